"""Incremental detokenisation: ours beside the `tokenizers` library's own `DecodeStream`, the text that comes
out and the processor time.

Each stream is held against the text of all its tokens at once. What differs is counted by kind of stream; one
that raises counts as different.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers import decoders
from tokenizers.decoders import DecodeStream
from tokenizers.models import BPE

from benchmarks.report import describe_run, run_command
from gateway.text import IncrementalDetokenizer, Tokenizer
from meshkit.modelstore import ModelFolder, default_cache_dir, open_model

TEXTS = ("🙂", "👩‍👩‍👧‍👦 family", "日本語のテキスト", "naïve 🇫🇷 café", "plain words of a text", "x\ufffdy")
REPLACEMENT = "\ufffd"
CHUNKS = (1, 4, 16, 64)
Stream = Callable[[Tokenizer, list[int], list[int], int], str]


def ours(tokenizer: Tokenizer, prompt: list[int], ids: list[int], chunk: int) -> str:
    """The text after `prompt`, `chunk` tokens at a time."""
    stream = IncrementalDetokenizer(tokenizer, prompt)
    pieces = [stream.feed(ids[start : start + chunk]) for start in range(0, len(ids), chunk)]
    return "".join([*pieces, stream.flush()])


def librarys(tokenizer: Tokenizer, prompt: list[int], ids: list[int], chunk: int) -> str:
    """The same by DecodeStream, which has no flush."""
    stream = DecodeStream(ids=prompt, skip_special_tokens=True)
    inner = tokenizer._inner
    steps = (ids[start : start + chunk] for start in range(0, len(ids), chunk))
    return "".join(stream.step(inner, step if len(step) > 1 else step[0]) or "" for step in steps)


STREAMS: dict[str, Stream] = {"ours": ours, "DecodeStream": librarys}


def sentencepiece(model: ModelFolder, folder: Path) -> Tokenizer:
    """One that decodes as Llama 2's does: a token for each byte, and a few words."""
    words = ["▁Hello", "▁world", "!"]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    inner = LibraryTokenizer(BPE({piece: id_ for id_, piece in enumerate(pieces)}, [], byte_fallback=True))
    inner.add_special_tokens(["<s>", "</s>"])
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    inner.save(str(folder / "tokenizer.json"))
    return Tokenizer(replace(model, tokenizer_file=folder / "tokenizer.json"))


class Sample:
    """Streams of one vocabulary: prompt and tokens."""

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self._draw = random.Random(seed)
        table = {tokenizer.token_bytes[token_id]: token_id for token_id in range(tokenizer.vocab_size)}
        self._id_of = {byte: table[bytes([byte])] for byte in range(256) if bytes([byte]) in table}
        self._special = max(tokenizer.special_token_ids)

    def _text(self) -> str:
        return " ".join(self._draw.choices(TEXTS, k=3))

    def _ids(self, data: bytes) -> list[int]:
        """A token for each byte, so that a character lies in several."""
        return [self._id_of[byte] for byte in data]

    def whole(self) -> tuple[list[int], list[int]]:
        """A text from its beginning."""
        return [], self._ids(self._text().encode())

    def special(self) -> tuple[list[int], list[int]]:
        """With a special token somewhere, which is left out."""
        ids = self._ids(self._text().encode())
        place = self._draw.randrange(len(ids))
        return [], [*ids[:place], self._special, *ids[place:]]

    def resumed(self) -> tuple[list[int], list[int]]:
        """After a prompt, or the tokens of a former stream, that end with a character."""
        return self._ids(self._text().encode()), self._ids(self._text().encode())

    def resumed_inside(self) -> tuple[list[int], list[int]]:
        """After one that ends inside of a character."""
        ids = self._ids("🙂".encode())
        cut = self._draw.randrange(1, len(ids))
        prompt, rest = self.resumed()
        return prompt + ids[:cut], ids[cut:] + rest

    def cut_off(self) -> tuple[list[int], list[int]]:
        """The end of all tokens lies inside of a character."""
        return [], self._ids((self._text() + "🙂").encode()[: -self._draw.randrange(1, 4)])

    def broken(self) -> tuple[list[int], list[int]]:
        """With a byte that belongs to no character."""
        data = bytearray(self._text().encode())
        data[self._draw.randrange(len(data))] = 0x80
        return [], self._ids(bytes(data))

    def noise(self) -> tuple[list[int], list[int]]:
        """Bytes at random, as a model of random weights, or the hash model, makes them."""
        return [], self._draw.choices(list(self._id_of.values()), k=24)


KINDS = ("whole", "special", "resumed", "resumed_inside", "cut_off", "broken", "noise")


def expected(tokenizer: Tokenizer, prompt: list[int], ids: list[int]) -> str:
    """What all tokens say at once, without what the prompt says."""
    whole, before = tokenizer.decode(prompt + ids), tokenizer.decode(prompt)
    settled = before if whole.startswith(before) else before.removesuffix(REPLACEMENT)
    return whole.removeprefix(settled)


def count_wrong(tokenizer: Tokenizer, count: int) -> dict[str, dict[str, str]]:
    """By kind and stream: how many of `count` differ, and how many of those raised."""
    sample = Sample(tokenizer, seed=1)
    table: dict[str, dict[str, str]] = {}
    for kind in KINDS:
        streams = [getattr(sample, kind)() for _ in range(count)]
        table[kind] = {name: _count_one(tokenizer, stream, streams) for name, stream in STREAMS.items()}
    return table


def _count_one(tokenizer: Tokenizer, stream: Stream, samples: Sequence[tuple[list[int], list[int]]]) -> str:
    wrong = raised = 0
    for index, (prompt, ids) in enumerate(samples):
        try:
            text = stream(tokenizer, prompt, ids, CHUNKS[index % len(CHUNKS)])
        except Exception:  # noqa: BLE001  # The library raises nothing narrower.
            raised += 1
        else:
            wrong += text != expected(tokenizer, prompt, ids)
    return f"{wrong + raised} of {len(samples)}" + (f" ({raised} raise)" if raised else "")


def measure(tokenizer: Tokenizer, rounds: int) -> dict[str, dict[str, float]]:
    """Best microseconds of processor time a token, by tokens a call."""
    text = "The quick brown fox jumps over the lazy dog. naïve café 日本語 🙂 " * 40
    ids = tokenizer.encode(text, add_special_tokens=False)[:512]
    return {
        str(chunk): {
            name: _best_us(stream, tokenizer, ids, chunk, rounds) for name, stream in STREAMS.items()
        }
        for chunk in CHUNKS
    }


def _best_us(stream: Stream, tokenizer: Tokenizer, ids: list[int], chunk: int, rounds: int) -> float:
    best = float("inf")
    for _ in range(20 * rounds):
        begun = time.process_time_ns()
        stream(tokenizer, [], ids, chunk)
        best = min(best, time.process_time_ns() - begun)
    return round(best / len(ids) / 1000, 3)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Both vocabularies' texts, and the times of the model's."""
    model = open_model(arguments.model, cache_dir=default_cache_dir())
    tokenizer = Tokenizer(model)
    with TemporaryDirectory() as folder:
        vocabularies = {"byte-level": tokenizer, "byte fallback": sentencepiece(model, Path(folder))}
        wrong = {name: count_wrong(each, arguments.streams) for name, each in vocabularies.items()}
    return {**describe_run(), "wrong": wrong, "us_per_token": measure(tokenizer, arguments.rounds)}


def print_table(report: Mapping[str, Any]) -> None:
    """For people."""
    for vocabulary, kinds in report["wrong"].items():
        for kind, streams in kinds.items():
            told = ", ".join(f"{name} {count} wrong" for name, count in streams.items())
            print(f"{vocabulary}, {kind}: {told}")
    for chunk, streams in report["us_per_token"].items():
        print(f"{chunk} tokens a call: " + ", ".join(f"{name} {us} us" for name, us in streams.items()))


def main(words: Sequence[str] | None = None) -> None:
    """Parse the command line, run, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m", help="one with a byte-level vocabulary")
    parser.add_argument("--streams", type=int, default=300, help="of each kind")
    parser.add_argument("--rounds", type=int, default=5)
    run_command(parser, run, print_table, words)


if __name__ == "__main__":
    main()

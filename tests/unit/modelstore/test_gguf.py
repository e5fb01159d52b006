"""GGUFs: the real one, small ones, and broken ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import gguf
import pytest
from tokenizers import Tokenizer

from meshkit.errors import InvalidArgument
from meshkit.modelstore import ModelFolder, default_cache_dir, open_model

if TYPE_CHECKING:
    from tests.unit.modelstore.conftest import TinyGguf


def refusal(reference: Path, cache_dir: Path) -> InvalidArgument:
    with pytest.raises(InvalidArgument) as caught:
        open_model(str(reference), cache_dir=cache_dir)
    assert caught.value.field == "model_path"
    assert "descriptions" not in os.listdir(cache_dir) or not os.listdir(cache_dir / "descriptions")
    return caught.value


@pytest.fixture
def cache_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "cache"
    folder.mkdir()
    return folder


def test_the_real_model_is_described_in_hugging_faces_words(smollm2: ModelFolder) -> None:
    assert smollm2.name == "smollm2-135m"
    assert (smollm2.context_length, smollm2.vocab_size, smollm2.eos_token_ids) == (8192, 49152, (2,))
    expected = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "rope_theta": 100000.0,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "rope_scaling": None,
    }
    assert {key: smollm2.config[key] for key in expected} == expected
    assert "<|im_start|>" in smollm2.tokenizer_config["chat_template"]
    assert smollm2.tokenizer_config["add_bos_token"] is False


def test_the_real_weights_stay_in_the_gguf(smollm2: ModelFolder) -> None:
    assert smollm2.weights is not None
    assert smollm2.weights.files == tuple(smollm2.source.glob("*.gguf"))
    assert len(smollm2.weights.tensors) == 272
    query = smollm2.weights.tensors["model.layers.0.self_attn.q_proj.weight"]
    assert (query.encoding, query.shape, query.rope_permuted_heads) == ("Q4_1", (576, 576), 9)
    key = smollm2.weights.tensors["model.layers.0.self_attn.k_proj.weight"]
    assert (key.shape, key.rope_permuted_heads) == ((192, 576), 3)
    assert smollm2.weights.tensors["model.embed_tokens.weight"].rope_permuted_heads is None
    described = sum(file.stat().st_size for file in smollm2.tokenizer_file.parent.iterdir())
    assert described < 5_000_000


def test_a_second_open_imports_neither_gguf_nor_torch(smollm2: ModelFolder) -> None:
    del smollm2  # opened once already
    program = (
        "import sys; from pathlib import Path; from meshkit.modelstore import open_model\n"
        "open_model('smollm2-135m', cache_dir=Path(sys.argv[1]))\n"
        "print([name for name in ('gguf', 'torch', 'numpy', 'tokenizers') if name in sys.modules])"
    )
    command = [sys.executable, "-c", program, str(default_cache_dir())]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.strip() == "[]"


def test_a_small_gguf_opens_with_its_own_head_and_names(tiny_gguf: TinyGguf, cache_dir: Path) -> None:
    folder = open_model(str(tiny_gguf.write()), cache_dir=cache_dir)
    assert folder.name == "tiny"
    assert folder.config["tie_word_embeddings"] is False
    assert folder.weights is not None
    assert folder.weights.tensors["lm_head.weight"].shape == (len(tiny_gguf.tokens), 32)
    assert folder.config["num_key_value_heads"] == 2
    assert folder.config["head_dim"] == 8


def test_a_folder_with_one_gguf_is_that_gguf(tiny_gguf: TinyGguf, cache_dir: Path) -> None:
    tiny_gguf.write()
    folder = open_model(str(tiny_gguf.folder), cache_dir=cache_dir)
    assert (folder.name, folder.source) == ("gguf", tiny_gguf.folder)


def test_a_folder_with_two_ggufs_is_ambiguous(tiny_gguf: TinyGguf, cache_dir: Path) -> None:
    tiny_gguf.write("a.gguf")
    tiny_gguf.write("b.gguf")
    assert "a.gguf, b.gguf" in refusal(tiny_gguf.folder, cache_dir).message


def test_a_changed_file_is_described_anew(tiny_gguf: TinyGguf, cache_dir: Path) -> None:
    file = tiny_gguf.write()
    first = open_model(str(file), cache_dir=cache_dir)
    tiny_gguf.metadata["llama.context_length"] = 128
    tiny_gguf.write()
    os.utime(file, ns=(0, first.source.stat().st_mtime_ns + 1))
    second = open_model(str(file), cache_dir=cache_dir)
    assert (first.context_length, second.context_length) == (64, 128)
    assert first.weights_version != second.weights_version


def test_progress_of_the_first_open_is_reported(tiny_gguf: TinyGguf, cache_dir: Path) -> None:
    file, seen = tiny_gguf.write(), list[tuple[str, float]]()
    open_model(str(file), cache_dir=cache_dir, progress=lambda stage, share: seen.append((stage, share)))
    assert ("reading", 1.0) in seen
    assert ("tokenizer", 1.0) in seen
    assert all(0.0 <= share <= 1.0 for _, share in seen)


def test_a_file_with_too_little_data_is_named_with_its_size_and_the_size_needed(
    tiny_gguf: TinyGguf, cache_dir: Path
) -> None:
    file = tiny_gguf.write()
    whole = file.stat().st_size
    os.truncate(file, whole - 1000)
    error = refusal(file, cache_dir)
    assert error.reason == "WEIGHTS_TRUNCATED"
    assert str(file) in error.message
    assert f"{whole - 1000} bytes" in error.message
    needed = int(error.message.rsplit("need ", 1)[1].split(";")[0])
    # Behind the last tensor there is padding at most.
    assert whole - 64 <= needed <= whole


def test_a_file_truncated_after_it_was_described_is_found_too(tiny_gguf: TinyGguf, cache_dir: Path) -> None:
    file = tiny_gguf.write()
    open_model(str(file), cache_dir=cache_dir)
    stat = file.stat()
    os.truncate(file, stat.st_size - 1000)
    with pytest.raises(InvalidArgument, match="truncated"):
        open_model(str(file), cache_dir=cache_dir)


@pytest.mark.parametrize("share", [0.02, 0.1, 0.3])
def test_a_file_that_ends_within_its_header_is_damaged(
    tiny_gguf: TinyGguf, cache_dir: Path, share: float
) -> None:
    file = tiny_gguf.write()
    header_bytes = 10_000
    os.truncate(file, int(header_bytes * share))
    assert refusal(file, cache_dir).reason == "WEIGHTS_TRUNCATED"


@pytest.mark.parametrize("content", [b"", b"GG", b"PK\x03\x04 and more"])
def test_what_does_not_begin_with_ggufs_magic_is_no_gguf(
    tmp_path: Path, cache_dir: Path, content: bytes
) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(content)
    assert refusal(file, cache_dir).reason == "NOT_GGUF"


def test_another_architecture_is_refused_by_name(tiny_gguf: TinyGguf, cache_dir: Path) -> None:
    message = refusal(tiny_gguf.write(architecture="mamba"), cache_dir).message
    assert "mamba" in message
    assert "llama (LlamaForCausalLM)" in message


def _experts(tiny: TinyGguf) -> None:
    tiny.metadata["llama.expert_count"] = 8


def _other_pre_tokenizer(tiny: TinyGguf) -> None:
    tiny.metadata["tokenizer.ggml.pre"] = "viking"


def _wordpiece(tiny: TinyGguf) -> None:
    tiny.metadata["tokenizer.ggml.model"] = "bert"


def _no_scores(tiny: TinyGguf) -> None:
    tiny.metadata["tokenizer.ggml.model"] = "llama"


def _partial_rotary(tiny: TinyGguf) -> None:
    tiny.metadata["llama.rope.dimension_count"] = 4


def _longrope(tiny: TinyGguf) -> None:
    tiny.metadata["llama.rope.scaling.type"] = "longrope"


def _linear_without_a_factor(tiny: TinyGguf) -> None:
    tiny.metadata["llama.rope.scaling.type"] = "linear"


def _strange_tensor(tiny: TinyGguf) -> None:
    tiny.shapes["blk.0.ssm_a.weight"] = (32,)


def _no_size(tiny: TinyGguf) -> None:
    del tiny.metadata["llama.embedding_length"]


def _damaged_merges(tiny: TinyGguf) -> None:
    tiny.merges.append("zz yy")


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (_experts, ["llama.expert_used_count", "positive integer"]),
        (_other_pre_tokenizer, ["viking", "smollm", "llama-bpe", "qwen2", "gpt-2"]),
        (_wordpiece, ["'bert'", "supported: gpt2, llama"]),
        (_no_scores, ["tokenizer.ggml.scores"]),
        (_partial_rotary, ["4 of 8 dimensions"]),
        (_longrope, ["longrope", "linear or yarn"]),
        (_linear_without_a_factor, ["llama.rope.scaling.factor"]),
        (_strange_tensor, ["blk.0.ssm_a.weight"]),
        (_no_size, ["llama.embedding_length"]),
        (_damaged_merges, ["vocabulary", "damaged"]),
    ],
)
def test_what_we_do_not_run_is_refused_by_name(
    tiny_gguf: TinyGguf, cache_dir: Path, spoil: Callable[[TinyGguf], None], words: list[str]
) -> None:
    spoil(tiny_gguf)
    message = refusal(tiny_gguf.write(), cache_dir).message
    assert all(word in message for word in words), message


def test_an_encoding_that_we_do_not_read_is_refused_with_the_ones_we_do(
    tiny_gguf: TinyGguf, cache_dir: Path
) -> None:
    message = refusal(tiny_gguf.write(raw_type=gguf.GGMLQuantizationType.Q5_0), cache_dir).message
    assert "Q5_0" in message
    assert "F32, F16, BF16, Q4_0, Q4_1, Q8_0, Q4_K, Q6_K" in message


def test_a_missing_tensor_and_one_of_another_shape_are_named(tiny_gguf: TinyGguf, cache_dir: Path) -> None:
    del tiny_gguf.shapes["blk.1.ffn_up.weight"]
    with pytest.raises(InvalidArgument, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        open_model(str(tiny_gguf.write()), cache_dir=cache_dir)
    tiny_gguf.shapes["blk.1.ffn_up.weight"] = (65, 32)
    with pytest.raises(InvalidArgument, match=r"shape \[65, 32\], config.json asks for \[64, 32\]"):
        open_model(str(tiny_gguf.write("other.gguf")), cache_dir=cache_dir)


def test_rotary_frequency_factors_go_into_the_configuration(tiny_gguf: TinyGguf, cache_dir: Path) -> None:
    tiny_gguf.shapes["rope_freqs.weight"] = (4,)
    scaling = open_model(str(tiny_gguf.write()), cache_dir=cache_dir).config["rope_scaling"]
    assert scaling["rope_type"] == "frequency_factors"
    assert len(scaling["factors"]) == 4


def pieces_of(tiny: TinyGguf, cache_dir: Path, pre: str, text: str) -> list[str]:
    tiny.metadata["tokenizer.ggml.pre"] = pre
    folder = open_model(str(tiny.write(f"{pre}.gguf")), cache_dir=cache_dir)
    tokenizer = Tokenizer.from_file(str(folder.tokenizer_file))
    return [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("smollm", ["It", "'s", "Ġ", "1", "2", "3", "4", "Ġpm", "!!", "Ċ"]),
        ("gpt-2", ["It", "'s", "Ġ1234", "Ġpm", "!!", "Ċ"]),
        ("llama-bpe", ["It", "'s", "Ġ", "123", "4", "Ġpm", "!!Ċ"]),
        ("qwen2", ["It", "'s", "Ġ", "1", "2", "3", "4", "Ġpm", "!!Ċ"]),
    ],
)
def test_each_pre_tokenizer_cuts_text_as_its_models_do(
    tiny_gguf: TinyGguf, cache_dir: Path, pre: str, pieces: list[str]
) -> None:
    assert pieces_of(tiny_gguf, cache_dir, pre, "It's 1234 pm!!\n") == pieces


def test_the_tokenizer_knows_merges_special_and_added_tokens(tiny_gguf: TinyGguf, cache_dir: Path) -> None:
    folder = open_model(str(tiny_gguf.write()), cache_dir=cache_dir)
    tokenizer = Tokenizer.from_file(str(folder.tokenizer_file))
    assert tokenizer.encode("<s>Hello<tool></s>").tokens == ["<s>", "He", "ll", "o", "<tool>", "</s>"]
    special = {token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    assert special == {0, 1}


def test_a_beginning_token_is_put_in_front_where_the_gguf_says_so(
    tiny_gguf: TinyGguf, cache_dir: Path
) -> None:
    tiny_gguf.metadata["tokenizer.ggml.add_bos_token"] = True
    folder = open_model(str(tiny_gguf.write()), cache_dir=cache_dir)
    tokenizer = Tokenizer.from_file(str(folder.tokenizer_file))
    assert tokenizer.encode("He").tokens == ["<s>", "He"]
    assert tokenizer.encode("He", add_special_tokens=False).tokens == ["He"]
    assert folder.tokenizer_config["add_bos_token"] is True


def test_end_of_turn_ends_a_generation_too(tiny_gguf: TinyGguf, cache_dir: Path) -> None:
    tiny_gguf.metadata["tokenizer.ggml.eot_token_id"] = 260
    assert open_model(str(tiny_gguf.write()), cache_dir=cache_dir).eos_token_ids == (1, 260)


def test_processes_that_open_the_same_file_at_once_agree(tiny_gguf: TinyGguf, cache_dir: Path) -> None:
    program = (
        "import sys, json; from pathlib import Path; from meshkit.modelstore import open_model\n"
        "sys.stdin.read(1)\n"
        "print(json.dumps(open_model(sys.argv[1], cache_dir=Path(sys.argv[2])).config))"
    )
    command = [sys.executable, "-c", program, str(tiny_gguf.write()), str(cache_dir)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    openers = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        for _ in range(3)
    ]
    for opener in openers:
        assert opener.stdin is not None
        opener.stdin.write("x")
        opener.stdin.flush()
    configs = [json.loads(opener.communicate(timeout=50)[0]) for opener in openers]
    assert configs[0] == configs[1] == configs[2]
    assert len(list((cache_dir / "descriptions").iterdir())) == 1

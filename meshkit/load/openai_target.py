"""Any server of OpenAI's HTTP interface as a target: /v1/completions or /v1/chat/completions, streamed."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import AsyncGenerator, Mapping
from types import TracebackType
from typing import Any

import orjson

from meshkit.errors import FailedPrecondition, Internal, InvalidArgument, MeshError, Unavailable
from meshkit.load.openai_chunks import ChunkReader, error_of, read_models
from meshkit.load.request import LoadRequest
from meshkit.load.targets import Received, ServedModel, choose_model

CONNECT_TIMEOUT_S = 10.0
_DATA = "data:"
_DONE = "[DONE]"


class OpenAiTarget:
    """One server, a connection for each live request. Use it as `async with`.

    base_url: "http://HOST:PORT", with or without "/v1". model: as the server calls it; "" leaves it out.
    chat: /v1/chat/completions, for which prompts are messages or text; else /v1/completions, for which they
        are token ids or text.
    ignore_eos: asked for in the body; llama.cpp, vLLM and SGLang know it, api.openai.com refuses it.
    extra_body: over what stands in the body otherwise. api_key: sent as a bearer token.

    Raises:
        InvalidArgument: base_url is none.
        FailedPrecondition: httpx2 is not installed.
    """

    def __init__(
        self,
        base_url: str,
        *,
        model: str = "",
        chat: bool = False,
        temperature: float = 0.0,
        ignore_eos: bool = True,
        extra_body: Mapping[str, Any] | None = None,
        api_key: str | None = None,
    ) -> None:
        self._httpx = _load_httpx()
        self._base_url = _read_base_url(base_url)
        self._model = model
        self._chat = chat
        self._settings: dict[str, Any] = {
            **({"model": model} if model else {}),
            "temperature": temperature,
            **({"ignore_eos": True} if ignore_eos else {}),
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        self._extra_body = dict(extra_body or {})
        self._headers = {"content-type": "application/json"}
        if api_key:
            self._headers["authorization"] = f"Bearer {api_key}"
        self._client: Any = None

    def __repr__(self) -> str:
        return f"<OpenAiTarget {self._base_url}{self._path} model={self._model!r}>"

    @property
    def _path(self) -> str:
        return "/v1/chat/completions" if self._chat else "/v1/completions"

    async def __aenter__(self) -> OpenAiTarget:
        # It reads the system's authorities, files among them.
        self._client = await asyncio.to_thread(self._make_client)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._client is not None:
            await self._client.aclose()

    async def choose_model(self) -> ServedModel:
        """See `Target.choose_model`. llama.cpp tells the size of the vocabulary, others do not."""
        try:
            response = await self._client.get("/v1/models")
        except self._httpx.HTTPError as error:
            raise self._unreached(error) from error
        if response.status_code != 200:
            raise error_of(response.status_code, response.content)
        chosen = choose_model(read_models(response.content), name=self._model, server=self._base_url)
        self._model = self._settings["model"] = chosen.name
        return chosen

    async def stream(self, request: LoadRequest) -> AsyncGenerator[Received, None]:
        """See `Target.stream`."""
        body = orjson.dumps({**self._settings, **self._prompt_of(request), **self._extra_body})
        reader = ChunkReader()
        try:
            async with self._client.stream("POST", self._path, content=body) as response:
                if response.status_code != 200:
                    raise error_of(response.status_code, await response.aread())
                async for line in response.aiter_lines():
                    if not line.startswith(_DATA):
                        continue
                    data = line[len(_DATA) :].strip()
                    if data == _DONE:
                        break
                    received = reader.read(_parse(data))
                    if received is not None:
                        yield received
        except self._httpx.HTTPError as error:
            raise self._unreached(error) from error
        if not reader.finished:
            raise Unavailable("the stream ended without a finish_reason", reason="STREAM_CUT")

    def _prompt_of(self, request: LoadRequest) -> dict[str, Any]:
        limit = {"max_tokens": request.max_tokens}
        if not self._chat:
            if request.messages is not None:
                raise InvalidArgument(
                    "--backend openai takes no messages; use openai-chat for them", field="--backend"
                )
            return {"prompt": request.text if request.token_ids is None else request.token_ids, **limit}
        if request.token_ids is not None:
            raise InvalidArgument(
                "--backend openai-chat takes text only, and these prompts are token ids; name the model's "
                "tokenizer with --tokenizer to have them as text, or use openai",
                field="--backend",
            )
        if request.text is not None:
            return {"messages": [{"role": "user", "content": request.text}], **limit}
        turns = request.messages or ()
        return {"messages": [{"role": turn.role, "content": turn.content} for turn in turns], **limit}

    def _make_client(self) -> Any:
        httpx = self._httpx
        return httpx.AsyncClient(
            base_url=self._base_url,
            headers=self._headers,
            # How long an answer takes is what is measured; only a server that is not there is given up.
            timeout=httpx.Timeout(None, connect=CONNECT_TIMEOUT_S),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
            verify=self._base_url.startswith("https:"),
            # What HTTP_PROXY names has no place between a load generator and its target.
            trust_env=False,
        )

    def _unreached(self, error: Exception) -> MeshError:
        kind = type(error).__name__
        return Unavailable(f"{self._base_url}: {kind}: {error}".rstrip(": "), reason=kind)


def _parse(data: str) -> dict[str, Any]:
    try:
        chunk = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise Internal(f"the server sent what is no JSON: {data[:80]!r}", reason="BAD_CHUNK") from error
    if not isinstance(chunk, dict):
        raise Internal(f"the server sent what is no object: {data[:80]!r}", reason="BAD_CHUNK")
    return chunk


def _read_base_url(base_url: str) -> str:
    trimmed = base_url.rstrip("/").removesuffix("/v1")
    if not trimmed.startswith(("http://", "https://")) or trimmed.endswith("//"):
        raise InvalidArgument(
            f"--base-url is {base_url!r}; http://HOST:PORT or https://HOST:PORT is allowed",
            field="--base-url",
        )
    return trimmed


def _load_httpx() -> Any:
    try:
        return importlib.import_module("httpx2")
    except ModuleNotFoundError as error:
        raise FailedPrecondition(
            "OpenAI's interface needs httpx2, which is not installed: `pip install 'chipmesh[bench]'`"
        ) from error

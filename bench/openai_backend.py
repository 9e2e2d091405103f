"""Any OpenAI-compatible server as the target of `bench serving` and `bench peers`: /v1/completions, streamed.

Needs aiohttp.
"""

from __future__ import annotations

import json
import math
import os
import time
from typing import TYPE_CHECKING, Any

from proc.settings import UsageError

if TYPE_CHECKING:
    from bench.serving import Backend, Outcome

VOCABULARY = 32_000  # such servers do not tell theirs; random ids below this are in all common ones


class OpenAIBackend:
    name = "openai"

    def __init__(self, base_url: str, model: str | None, api_key: str | None) -> None:
        self.url, self.model = base_url.rstrip("/").removesuffix("/v1"), model
        key = api_key or os.environ.get("OPENAI_API_KEY")
        self.headers = {"Authorization": f"Bearer {key}"} if key else {}

    async def __aenter__(self) -> Backend:
        try:
            import aiohttp
        except ImportError:
            raise UsageError("an OpenAI-compatible server needs aiohttp: pip install 'sidestep[bench]'") from None
        # a connection for each request: llama.cpp's server closes those that it promised to keep after a stream
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        self.session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=3600), connector=connector, headers=self.headers
        )
        try:
            models = await self._models()
        except (aiohttp.ClientError, OSError, ValueError, LookupError) as error:
            await self.session.close()
            raise UsageError(f"{self.url}: no answer to /v1/models: {error}") from None
        if self.model not in (None, *models):
            await self.session.close()
            raise UsageError(f"--model {self.model}: the server has {', '.join(models)}")
        self.model = self.model or models[0]
        return self

    async def _models(self) -> list[str]:
        async with self.session.get(f"{self.url}/v1/models") as reply:
            reply.raise_for_status()
            return [one["id"] for one in (await reply.json())["data"]]

    async def __aexit__(self, *_: object) -> None:
        await self.session.close()

    async def request(self, outcome: Outcome, ignore_eos: bool) -> None:
        job = outcome.job
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": job.prompt,
            "max_tokens": job.output_len,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if ignore_eos:
            body["ignore_eos"] = True
        outcome.sent = time.perf_counter()
        async with self.session.post(f"{self.url}/v1/completions", json=body) as reply:
            if reply.status != 200:
                raise RuntimeError(f"HTTP {reply.status}: {(await reply.text())[:200]}")
            async for line in reply.content:
                if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
                    self._event(outcome, json.loads(line[6:]))
        if not outcome.output_tokens:
            raise RuntimeError("the stream ended without usage")

    @staticmethod
    def _event(outcome: Outcome, event: dict[str, Any]) -> None:
        if "error" in event:
            raise RuntimeError(str(event["error"]))
        usage = event.get("usage")
        if usage:
            outcome.prompt_tokens, outcome.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
        for choice in event["choices"]:
            outcome.token_times.append(time.perf_counter())
            outcome.text.append(choice.get("text") or "")

    async def vocabulary(self) -> int:
        return VOCABULARY

    async def retokenize(self, text: str) -> int | None:
        return None

    async def device(self) -> tuple[float, float]:
        return math.nan, math.nan

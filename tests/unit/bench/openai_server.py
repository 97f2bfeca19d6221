"""A tiny OpenAI-compatible server whose misbehaviour a test chooses."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web


class FakeServer:
    """Streams ``max_tokens`` chunks of one token; records every body that it was sent."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.base_url = ""
        self.usage = True
        self.status = 200
        self.refusal: bytes = b""
        self.after_tokens: Callable[[web.StreamResponse, web.Request, int], Any] | None = None
        self.num_in_flight = 0
        self.max_in_flight = 0
        self.gate: asyncio.Event | None = None

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.num_in_flight += 1
        self.max_in_flight = max(self.max_in_flight, self.num_in_flight)
        try:
            if self.gate is not None:
                await self.gate.wait()
            if self.status != 200:
                return web.Response(status=self.status, body=self.refusal)
            return await self._answer(request, body)
        finally:
            self.num_in_flight -= 1

    async def _answer(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        prompt = body.get("prompt") or body["messages"][0]["content"].split()
        usage = {"prompt_tokens": len(prompt), "completion_tokens": body["max_tokens"]}
        if not body["stream"]:
            return web.json_response({"choices": [{"text": "x" * body["max_tokens"]}], "usage": usage})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b": keep-alive\n\n")
        chat = "messages" in body
        if chat:
            await _event(response, {"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        for index in range(body["max_tokens"]):
            if self.after_tokens is not None and await self.after_tokens(response, request, index):
                return response
            await _event(response, {"choices": [{"delta": {"content": "x"}} if chat else {"text": "x"}]})
            await asyncio.sleep(0)
        if self.usage:
            await _event(response, {"choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")
        return response


async def _event(response: web.StreamResponse, value: object) -> None:
    await response.write(b"data: " + json.dumps(value).encode() + b"\n\n")


@asynccontextmanager
async def serving() -> AsyncIterator[FakeServer]:
    server = FakeServer()
    app = web.Application()
    app.router.add_post("/v1/completions", server.handle)
    app.router.add_post("/v1/chat/completions", server.handle)
    # handler_cancellation: a client that leaves ends its handler, so that closing does not wait for hung ones.
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    server.base_url = f"http://{host}:{port}/v1"
    try:
        yield server
    finally:
        await runner.cleanup()

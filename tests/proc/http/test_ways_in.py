"""Other programs against the server: curl, the openai client of Node.js, and a browser on the page."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from proc.supervisor import Supervisor
from tests.proc.http.conftest import Start

NODE = """
import OpenAI from "openai";
const client = new OpenAI({ baseURL: process.argv[2] + "/v1", apiKey: "unused" });
const messages = [{ role: "user", content: "hello" }];
const wish = { model: "sim", messages, temperature: 0, max_tokens: 12, ignore_eos: true };
const whole = await client.chat.completions.create(wish);
let text = "";
const stream = await client.chat.completions.create({ ...wish, stream: true });
for await (const chunk of stream) text += chunk.choices[0]?.delta?.content ?? "";
if (text !== whole.choices[0].message.content) throw new Error("stream and whole differ");
try { await client.chat.completions.create({ ...wish, temperature: -1 }); throw new Error("not refused"); }
catch (error) { if (!(error instanceof OpenAI.BadRequestError)) throw error; }
console.log(whole.usage.completion_tokens);
"""


def run(*command: str, cwd: Path | None = None) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=cwd, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    return done.stdout


@pytest.mark.skipif(not shutil.which("curl"), reason="curl is not installed")
def test_curl(start: Start) -> None:
    url = start().url
    body = '{"prompt": "hi", "max_tokens": 4, "ignore_eos": true, "stream": true}'
    streamed = run("curl", "-sN", f"{url}/v1/completions", "-d", body)
    assert streamed.count("data: ") >= 2 and streamed.endswith("data: [DONE]\n\n")
    whole = json.loads(run("curl", "-s", f"{url}/v1/completions", "-d", body.replace(', "stream": true', "")))
    assert whole["usage"]["completion_tokens"] == 4
    chunked = run("curl", "-s", f"{url}/v1/completions", "-H", "Transfer-Encoding: chunked", "-d", '{"prompt": "hi"}')
    assert json.loads(chunked)["object"] == "text_completion"
    assert run("curl", "-s", "-o", "/dev/null", "-w", "%{http_code}", f"{url}/health") == "200"
    assert "sidestep:num_requests_running" in run("curl", "-s", f"{url}/metrics")


def test_schemathesis_on_our_own_document(start: Start, tmp_path: Path) -> None:
    """Whatever the document allows or forbids is answered as it says; nothing is a 500."""
    command = [
        str(Path(sys.executable).with_name("schemathesis")),
        "run",
        f"{start(max_model_len=300).url}/openapi.json",
    ]
    # a body may be well formed and still ask for what cannot be, such as an empty conversation
    run(*command, "--max-examples", "25", "--seed", "1", "--exclude-checks", "positive_data_acceptance", cwd=tmp_path)


@pytest.mark.skipif(not shutil.which("npm"), reason="npm is not installed")
def test_the_openai_client_of_node(start: Start, tmp_path: Path) -> None:
    (tmp_path / "ask.mjs").write_text(NODE)
    command = ["npm", "install", "--no-audit", "--no-fund", "openai@7.59.0"]
    installed = subprocess.run(command, capture_output=True, timeout=100, cwd=tmp_path, check=False)
    if installed.returncode:
        pytest.skip(f"npm cannot install openai: {installed.stderr.decode()[-200:]}")
    assert run("node", "ask.mjs", start().url, cwd=tmp_path) == "12\n"


@pytest.mark.skipif(not shutil.which("chromium"), reason="chromium is not installed")
@pytest.mark.parametrize("width", [1200, 390])
def test_the_page_in_a_browser(start: Start, tmp_path: Path, width: int) -> None:
    """By keyboard: a message is typed and sent with Enter, the answer streams in, the lanes are drawn."""
    server = start(device="sim:h200-qwen3-0.6b", max_model_len=700)
    found = asyncio.run(browse(server, tmp_path, width))
    assert found["answer"] and found["user"] == "hello" and not found["errors"]
    assert found["painted"] > 500 and "median step" in found["span"] and found["model"].endswith("sim")
    assert found["wide"] <= width


async def browse(server: Supervisor, folder: Path, width: int) -> dict[str, Any]:
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0", f"--user-data-dir={folder}"]
    browser = subprocess.Popen(["chromium", *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(300):
            if (folder / "DevToolsActivePort").exists() and (folder / "DevToolsActivePort").read_text().count("\n"):
                break
            await asyncio.sleep(0.1)
        port = (folder / "DevToolsActivePort").read_text().split()[0]
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{port}/json") as reply:
                tabs = await reply.json()
            address = next(tab["webSocketDebuggerUrl"] for tab in tabs if tab["type"] == "page")
            async with session.ws_connect(address, max_msg_size=0) as socket:
                return await talk(socket, server.url, width)
    finally:
        browser.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            browser.wait(10)
        browser.kill()
        browser.wait()


async def talk(socket: aiohttp.ClientWebSocketResponse, url: str, width: int) -> dict[str, Any]:
    number = 0

    async def call(method: str, **params: Any) -> Any:
        nonlocal number
        number += 1
        await socket.send_json({"id": number, "method": method, "params": params})
        while True:
            reply = json.loads((await socket.receive()).data)
            if reply.get("id") == number:
                return reply["result"]

    async def value(expression: str) -> Any:
        return (await call("Runtime.evaluate", expression=expression, returnByValue=True))["result"].get("value")

    size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 500}
    await call("Emulation.setDeviceMetricsOverride", **size)
    await call("Page.navigate", url=f"{url}/")
    while await value("document.activeElement && document.activeElement.id") != "words":
        await asyncio.sleep(0.1)
    await call("Input.insertText", text="hello")
    for kind in ("keyDown", "keyUp"):
        await call("Input.dispatchKeyEvent", type=kind, key="Enter", code="Enter", windowsVirtualKeyCode=13)
    ended = "document.getElementById('send').textContent === 'Send'"
    for _ in range(200):
        if await value(f"{ended} && !!document.querySelector('.assistant')?.textContent"):
            break
        await asyncio.sleep(0.1)
    await asyncio.sleep(1.5)  # the next look at the pipeline
    painted = """(() => {
        const lanes = document.getElementById('lanes'), paint = lanes.getContext('2d');
        const dots = paint.getImageData(100, 0, lanes.width - 100, lanes.height).data;
        return dots.filter((value, n) => n % 4 === 3 && value > 0).length; })()"""
    return {
        "answer": await value("document.querySelector('.assistant').textContent"),
        "user": await value("document.querySelector('.user').textContent"),
        "errors": await value("document.querySelectorAll('.error').length"),
        "painted": await value(painted),
        "span": await value("document.getElementById('span').textContent"),
        "model": await value("document.getElementById('model').textContent"),
        "wide": await value("document.documentElement.scrollWidth"),
    }

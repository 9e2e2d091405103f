"""The flags of `sidestep bench serving` and `bench overlap`, in the field's usual words. Imports nothing heavy."""

from __future__ import annotations

import argparse

from proc.settings import positive


def add_serving_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--backend", choices=("sidestep", "openai"), default="sidestep", help="our socket, or any OpenAI-compatible URL"
    )
    add("--address", help="of the server (sidestep; default: the one running)")
    add(
        "--base-url",
        default="http://127.0.0.1:8000",
        help="of the server, with or without /v1 (openai; default: http://127.0.0.1:8000)",
    )
    add("--api-key", help="that it asks for (openai; default: $OPENAI_API_KEY)")
    add("--model", help="its name (openai; default: the first it lists)")
    add("--num-prompts", "--num-prompt", type=positive, default=100, help="requests (default: 100)")
    add("--request-rate", type=float, default=float("inf"), help="requests per second (default: inf, all at once)")
    add("--burstiness", type=float, default=1.0, help="1 is Poisson; below it burstier, above it more even (gamma)")
    add("--max-concurrency", type=positive, help="requests under way at once (default: all)")
    add("--seed", type=int, default=0, help="of lengths, prompts and arrivals")
    add("--dataset-name", choices=("random", "sharegpt", "custom"), default="random")
    add("--dataset-path", help="sharegpt: its JSON; custom: JSONL with prompt and output_len")
    add("--random-input-len", type=positive, default=128, help="tokens (default: 128)")
    add("--random-output-len", type=positive, default=64, help="tokens (default: 64)")
    add(
        "--random-range-ratio",
        type=float,
        default=0.0,
        help="lengths are uniform in len * (1 - r) .. len * (1 + r), as in vLLM (SGLang's r is a lower bound)",
    )
    add("--disable-ignore-eos", action="store_true", help="let answers end by themselves")
    add("--warmup-requests", type=int, default=1, help="sent and finished before the clock starts")
    add("--output-file", help="append the JSON line to this file")
    add("--disable-tqdm", action="store_true", help="no progress bar")


PEERS = """Measures running OpenAI-compatible servers side by side: the same requests to each, one server after the
other, round after round; ratios are taken within a round. Workloads: A, 64 requests of 16 to 256 tokens, 64 tokens out,
16 at once; B, 8 of these, one at a time; C, 64 requests of 512 tokens in common and 32 of their own, 32 out, 16 at
once. Start the servers yourself and leave all of them running. An idle one must not spin, or it takes a core from the
one that is measured: look at `top` first."""


def add_peers_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--url",
        action="append",
        type=named_url,
        required=True,
        metavar="NAME=URL",
        help="a server and its name in the table, with or without /v1; once for each server",
    )
    add("--base", metavar="NAME", help="the server that the ratios are over (default: the first)")
    add("--workload", nargs="+", choices=("A", "B", "C"), default=["A", "B", "C"], help="(default: A B C)")
    add("--repeats", type=positive, default=3, help="rounds; the figures are medians (default: 3)")
    add("--seed", type=int, help="of the prompts (default: new ones, which no server has in its cache from before)")
    add("--vocab-size", type=positive, default=32_000, help="prompts are ids below it (default: 32000)")
    add("--json", action="store_true", help="only the JSON line")


def named_url(text: str) -> tuple[str, str]:
    name, _, url = text.partition("=")
    if not name or not url.startswith(("http://", "https://")):
        raise argparse.ArgumentTypeError(f"{text} is not NAME=URL")
    return name, url


def add_overlap_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--workload", choices=("sharegpt-3000", "small-steps", "shared-prefix", "poisson"), default="small-steps")
    add(
        "--modes",
        default="threads,depth0,depth1,depth2",
        help="threads (--procs 1, depth 1; threads0, threads2), depth0..2",
    )
    add("--num-prompts", type=int, help="requests (default: the workload's)")
    add("--repeats", type=int, default=1, help="rounds through all modes; the figures are medians")
    add("--device", help="another simulated device, sim:NAME or sim:FILE.toml")
    add("--model", default="smollm2", help="whose vocabulary is used; bytes: none")
    add("--sim-launch-ms", type=float, nargs="+", default=[], help="the host's work per step, one variant each")
    add("--sim-launch-work", nargs="+", choices=("torch", "python"), default=["torch"], help="what it is made of")
    add("--grammar-rows", type=int, default=0, help="also with so many of 256 streams under a JSON schema")
    add("--longest", type=float, default=15.0, help="seconds after which no further request arrives")
    add("--no-stream", action="store_true", help="whole answers: no chunk per token for the client")
    add("--seed", type=int, default=0, help="of prompts and arrivals")
    add("--json", action="store_true", help="only the JSON lines")
    add("--trace", metavar="FOLDER", help="write each run's last steps there, for Perfetto")
    add("--picture", metavar="FILE", help="a picture of the idle share by mode, .svg or .png (needs matplotlib)")


def add_sampler_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--rows", type=positive, default=64, help="of a step (default: 64)")
    add("--vocab-size", type=positive, default=49152, help="ids, at least 64 (default: 49152, SmolLM2's)")
    add("--history", type=positive, default=512, help="known ids of each row, for penalties (default: 512)")
    add("--repeats", type=positive, default=30, help="runs of each case (default: 30)")
    add("--json", action="store_true", help="only the JSON line")


def add_kernels_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", metavar="FOLDER", help="with config.json and safetensors (default: random weights, SmolLM2's shape)")
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of weights and keys (default: bfloat16)")
    add("--repeats", type=positive, default=15, help="turns of each case, fewer of what takes long (default: 15)")
    add("--threads", type=positive, help="that compute (default: torch's)")
    add("--quick", action="store_true", help="tiny shapes, only to see that it runs")
    add("--json", action="store_true", help="only the JSON line")


def add_device_flags(parser: argparse.ArgumentParser) -> None:
    from bench.shapes import SHAPES

    add = parser.add_argument
    add("--shape", choices=list(SHAPES), default="qwen3-0.6b", help="of the model (default: qwen3-0.6b)")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="default: cuda")
    add("--rows", type=positive, nargs="+", default=[1, 16, 64, 256], help="of decode steps (default: 1 16 64 256)")
    add("--tokens", type=positive, default=96, help="of each answer (default: 96)")
    add("--prefill", type=positive, default=8192, help="tokens of the prompt that is one step (default: 8192)")
    layouts = ("3:1", "3:0", "1:1", "3:2", "1:0", "2:1")
    add("--token-table", choices=("auto", "cuda-ipc", "pinned"), default="auto", help="of a GPU, as for `serve`")
    add("--layouts", nargs="+", choices=layouts, default=["3:1", "3:0", "1:1"], help="--procs:--overlap-depth")
    add("--json", action="store_true", help="only the JSON line")


def add_perplexity_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", default="smollm2", help="smollm2, a folder or a .gguf file (default: smollm2)")
    kinds = ("none", "int8", "int4", "gguf")
    add("--quantization", nargs="+", choices=kinds, default=["none", "int8", "int4"], help="compared with the first")
    add("--chunk", type=positive, default=512, help="tokens that are seen together (default: 512)")
    add("--chunks", type=positive, default=16, help="of the text (default: 16)")
    add("--json", action="store_true", help="only the JSON line")

"""A real router (smg) in front of two scheduler-worker pairs, over VllmEngine.

The tests cover routes, prefixes, a lost worker and lost schedulers.
"""

import itertools
import json
import random
import re
import shutil
import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml
from smg_grpc_proto import vllm_engine_pb2_grpc
from smg_grpc_proto.generated import common_pb2

from pagewire import Client, SamplingParams
from pagewire.hosting.supervisor import free_port
from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc
from testing.forked import ForkedProcess
from testing.router import Router, ask, wait_until
from testing.services import HOST, System

ROOT = Path(__file__).parents[2]
MODEL = "storyteller"
KEY = "s3cret"
PROMPT = "Once there was a brave turtle"
GREEDY = {"model": MODEL, "temperature": 0, "max_tokens": 40}
CHAT = {"messages": [{"role": "user", "content": PROMPT}]}
LONG = {"model": MODEL, "prompt": PROMPT, "max_tokens": 1900, "ignore_eos": True, "seed": 1}
TOOL = {"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}
TOOL_TEMPLATE = "A story with {{ tools | length }} tools: {{ messages[0].content }}"
ADMINISTRATION = (("POST", "/workers"), ("GET", "/workers"), ("POST", "/flush_cache"))


@dataclass
class Pair:
    model: Path
    metrics_port: int = field(default_factory=lambda: free_port(HOST))

    def __post_init__(self) -> None:
        flags = ["--worker-grace", 1, "--worker-timeout", 600, "--metrics-port", self.metrics_port]
        worker = ["--dtype", "float32", "--num-threads", 1, "--num-device-blocks", 2048]
        self.system = System(self.model, worker=worker, scheduler=flags, start=ForkedProcess)

    def loads(self) -> scheduler_pb2.GetLoadsResponse:
        with grpc.insecure_channel(self.system.url) as channel:
            return scheduler_pb2_grpc.SchedulerServiceStub(channel).GetLoads(scheduler_pb2.GetLoadsRequest())

    @property
    def is_idle(self) -> bool:
        loads = self.loads()
        return not (loads.num_running or loads.num_waiting or loads.num_held_blocks)

    def num_tokenizer_bytes(self) -> int:
        """Return the size of the tokenizer files, which a scheduler reads at the first request for them."""
        with grpc.insecure_channel(self.system.url) as channel:
            chunks = vllm_engine_pb2_grpc.VllmEngineStub(channel).GetTokenizer(common_pb2.GetTokenizerRequest())
            return sum(len(chunk.data) for chunk in chunks)

    def num_sent_away(self) -> float:
        with urllib.request.urlopen(f"http://{HOST}:{self.metrics_port}/metrics") as response:
            text = response.read().decode()
        (count,) = re.findall(r'vllm:request_success_total\{[^}]*finished_reason="error"[^}]*\} (\S+)', text)
        return float(count)


def key_flag(key: str) -> str:
    """Return the manifest's flag that protects the router's administration, with this key."""
    deployment = next(yaml.safe_load_all((ROOT / "deploy/components/router/router.yaml").read_text()))
    arguments = deployment["spec"]["template"]["spec"]["containers"][0]["args"]
    (flag,) = [argument for argument in arguments if argument.startswith("--control-plane-api-keys=")]
    assert "$(ADMIN_KEY)" in flag
    return flag.replace("$(ADMIN_KEY)", key)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the bundled model with a second chat template, for tools."""
    path = tmp_path_factory.mktemp("models") / MODEL
    shutil.copytree(ROOT / "models" / MODEL, path)
    config = json.loads((path / "tokenizer_config.json").read_text())
    templates = {"default": config["chat_template"], "tool_use": TOOL_TEMPLATE}
    config["chat_template"] = [{"name": name, "template": text} for name, text in templates.items()]
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


@pytest.fixture(scope="module")
def pairs(model: Path) -> Iterator[list[Pair]]:
    made: list[Pair] = []
    try:
        made += [Pair(model) for _ in range(2)]
        yield made
    finally:
        for service in (each for pair in made for each in (pair.system.scheduler, pair.system.worker)):
            service.kill()


@pytest.fixture(scope="module")
def router(pairs: list[Pair], model: Path) -> Iterator[Router]:
    """A router that starts while the model's files are hidden: as in a cluster, it must get them from a scheduler."""
    assert all(pair.num_tokenizer_bytes() > 10_000 for pair in pairs)
    hidden = model.rename(model.with_name("hidden"))
    with Router([pair.system.url for pair in pairs], "--policy=cache_aware", key_flag(KEY), key=KEY) as router:
        hidden.rename(model)
        yield router


def direct(pair: Pair, prompt: str, max_tokens: int = 40) -> str:
    with Client(pair.system.url) as client:
        return client.complete(prompt, SamplingParams(temperature=0, max_tokens=max_tokens)).outputs[0].text


def test_every_route_tells_the_same_story(pairs: list[Pair], router: Router) -> None:
    story = direct(pairs[0], PROMPT)
    assert [model["id"] for model in router.get("/v1/models").body["data"]] == [MODEL]
    completion = router.post("/v1/completions", prompt=PROMPT, **GREEDY)
    assert (completion.status, completion.text) == (200, story)
    assert completion.body["usage"]["completion_tokens"] == 40
    chat = router.post("/v1/chat/completions", **CHAT, **GREEDY)
    assert (chat.status, chat.text) == (200, story)
    sampling = {"temperature": 0, "max_new_tokens": 40}
    assert router.post("/generate", model=MODEL, text=PROMPT, sampling_params=sampling).body[0]["text"] == story
    stream = router.stream("/v1/chat/completions", **CHAT, **GREEDY)
    pieces = [event["choices"][0]["delta"].get("content") or "" for event in stream if event["choices"]]
    assert ("".join(pieces), stream.is_done) == (story, True)
    assert sum(map(bool, pieces)) > 10
    (embedded,) = router.post("/v1/embeddings", model=MODEL, input=PROMPT).body["data"]
    with Client(pairs[0].system.url) as client:
        assert embedded["embedding"] == pytest.approx(client.embed(PROMPT).values, abs=2e-6)


def test_it_chooses_among_named_templates(pairs: list[Pair], router: Router) -> None:
    """The router uses the template for tools if there are tools, and otherwise the default, like our own client."""
    with Client(pairs[0].system.url) as client:
        for tools in (None, [TOOL]):
            answer = router.post("/v1/chat/completions", **CHAT, **GREEDY, **({"tools": tools} if tools else {}))
            own = client.chat(CHAT["messages"], max_tokens=1, template_variables={"tools": tools})
            assert answer.body["usage"]["prompt_tokens"] == own.usage.prompt_tokens


def test_bad_requests_are_the_clients_fault(router: Router) -> None:
    for text, fields in (
        ("n is 17, but must be 1 to 16", {"n": 17}),
        ("context length is 2048", {"prompt": "a " * 3000}),
    ):
        answer = router.post("/v1/completions", **({"model": MODEL, "prompt": PROMPT, "max_tokens": 4} | fields))
        assert (answer.status, text in answer.body["error"]["message"]) == (400, True), answer


def test_the_key_of_the_manifest_closes_the_administration(router: Router) -> None:
    """Administration requires the key; otherwise a stranger could add a worker that receives prompts."""
    for method, path in ADMINISTRATION:
        for key in ("", "another"):
            assert ask(router.port, method, path, {"url": "grpc://127.0.0.1:1"}, key).status == 401
    assert router.get("/workers").status == 200


def test_an_empty_key_opens_nothing() -> None:
    """An empty key, as in a Secret that was not filled in, permits no administration."""
    with Router([], key_flag("")) as router:
        for key in ("", "admin"):
            assert ask(router.port, "GET", "/workers", None, key).status == 401


def test_a_client_that_leaves_a_stream_frees_its_blocks(pairs: list[Pair], router: Router) -> None:
    stream = router.stream("/v1/completions", **LONG)
    for _, _ in zip(stream, range(5), strict=False):
        pass
    assert not all(pair.is_idle for pair in pairs)
    stream.close()
    wait_until(lambda: all(pair.is_idle for pair in pairs))


def test_prompts_follow_their_prefix(pairs: list[Pair], router: Router) -> None:
    """Prompts that the router has not seen are routed to the pair that has them cached, by the schedulers' KV events.

    All prompts reach the right pair by chance once in 65,536 times.
    """
    numbers, rng = itertools.count(), random.Random(11)

    def follow() -> bool:
        prompts = [f"{next(numbers)} foxes and a kind turtle went into the deep forest, " * 4 for _ in range(16)]
        for prompt in prompts:
            direct(rng.choice(pairs), prompt, max_tokens=1)
        return all(router.post("/v1/completions", **asked(prompt, FEW)).num_cached_tokens >= 32 for prompt in prompts)

    wait_until(follow, 60)


PROMPTS = ("Once there was", "One day", "The little fox", "A bear", "In the forest", "The owl")
MANY, FEW = 1000, 8  # tokens


def asked(prompt: str, max_tokens: int) -> dict[str, Any]:
    return LONG | {"prompt": prompt, "max_tokens": max_tokens}


def read(router: Router, prompt: str, max_tokens: int, has_begun: threading.Event | None = None) -> str:
    """Return the text of a stream that must complete."""
    stream, text = router.stream("/v1/completions", **asked(prompt, max_tokens)), ""
    assert stream.status == 200
    for event in stream:
        assert "error" not in event, event
        if has_begun is not None:
            has_begun.set()
        text += "".join(choice["text"] for choice in event["choices"])
    assert stream.is_done
    stream.close()
    return text


def whole(router: Router, prompt: str, max_tokens: int) -> str:
    answer = router.post("/v1/completions", **asked(prompt, max_tokens))
    assert answer.status == 200, answer
    return answer.text


@pytest.mark.thorough
def test_only_streams_that_have_begun_wait_for_a_lost_worker(pairs: list[Pair], router: Router) -> None:
    with ThreadPoolExecutor(64) as pool:
        calm = list(pool.map(lambda prompt: whole(router, prompt, MANY), PROMPTS))
        # The client of a non-streamed output has received nothing yet, however many tokens exist.
        wholes = [pool.submit(whole, router, prompt, MANY) for prompt in PROMPTS]
        begun = [threading.Event() for _ in PROMPTS]
        streams = [pool.submit(read, router, prompt, MANY, event) for prompt, event in zip(PROMPTS, begun, strict=True)]
        for event in begun:
            assert event.wait(60)
        victim = max(pairs, key=lambda pair: pair.loads().num_running)
        victim.system.worker.kill()
        shorts = [pool.submit(each, router, prompt, FEW) for prompt in PROMPTS for each in (whole, read)]
        assert [each.result(60) for each in wholes] == calm
        assert all(each.result(60) for each in shorts)
        assert victim.loads().num_waiting > 0, "the streams"
        assert victim.num_sent_away() > 0
        victim.system.restart_worker()
        assert [stream.result(60) for stream in streams] == calm
        victim.system.worker.wait_until_ready()
        router.wait_for_schedulers(2)


def test_schedulers_that_die_end_their_streams_alone(pairs: list[Pair], router: Router) -> None:
    stream = router.stream("/v1/completions", **LONG)
    assert stream.status == 200
    wait_until(lambda: any(pair.loads().num_running for pair in pairs))
    (victim,) = [pair for pair in pairs if pair.loads().num_running]
    victim.system.scheduler.kill()
    assert "error" in list(stream)[-1]
    for prompt in PROMPTS:
        assert router.post("/v1/completions", **asked(prompt, FEW)).status == 200
    for pair in pairs:
        if pair is not victim:
            pair.system.scheduler.kill()
    assert router.post("/v1/completions", **asked(PROMPT, FEW)).status == 503

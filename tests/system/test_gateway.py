"""smg in front of two replicas, all real processes: what clients of the OpenAI API get."""

import asyncio
import http.client
import json
import os
import random
import shutil
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from smg_grpc_proto import vllm_engine_pb2_grpc
from smg_grpc_proto.generated import common_pb2
from tokenizers import Tokenizer

from pagewire import AsyncClient, Client, SamplingParams
from pagewire.hosting.supervisor import free_port
from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc
from testing.gateway import Gateway, ask, post, send, wait_until
from testing.scheduler_stack import make_checkpoint, serve
from testing.services import HOST, Service, children_of

MODEL = "storyteller"
MAX_MODEL_LEN = 2048
MAX_NUM_SEQS = 4
# Two replicas run 8 sequences at the same time, and 8 more may wait.
FLAGS = (
    *("--metrics-port", 0, "--log-level", "error", "--num-threads", 1, "--block-size", 16, "--num-device-blocks", 1024),
    *("--max-num-seqs", MAX_NUM_SEQS, "--max-waiting-requests", 4),
)


class Replica:
    """A `pagewire serve` that can be killed and started again at its port."""

    def __init__(self, model: Path, *flags: object) -> None:
        self._flags = [model, "--port", free_port(HOST), *FLAGS, *flags]
        self._channel: grpc.Channel | None = None
        self.start()

    def start(self) -> None:
        self.service = Service("serve", self._flags)

    def wait_until_ready(self) -> None:
        self.address = self.service.wait_until_ready()
        self._channel = grpc.insecure_channel(self.address)
        self.stub = scheduler_pb2_grpc.SchedulerServiceStub(self._channel)

    def kill(self) -> None:
        """Scheduler and worker, at once."""
        self.service.kill()
        self._channel.close()

    def stop(self) -> None:
        self._channel.close()
        assert self.service.stop() == 0

    def loads(self) -> scheduler_pb2.GetLoadsResponse:
        return self.stub.GetLoads(scheduler_pb2.GetLoadsRequest())

    @property
    def is_idle(self) -> bool:
        loads = self.loads()
        return not (loads.num_running or loads.num_waiting or loads.num_held_blocks)

    def tokenizer_bytes(self) -> int:
        stub = vllm_engine_pb2_grpc.VllmEngineStub(self._channel)
        return sum(len(chunk.data) for chunk in stub.GetTokenizer(common_pb2.GetTokenizerRequest()))


@dataclass
class Fleet:
    gateway: Gateway
    replicas: list[Replica]
    own_port: int  # of the gateway that the first replica runs for itself

    def busy(self) -> Replica:
        """The one that runs the only request there is, once it has made a token of it."""
        before = [replica.loads().num_generation_tokens for replica in self.replicas]
        found: list[Replica] = []

        def is_found() -> bool:
            for replica, count in zip(self.replicas, before, strict=True):
                if replica.loads().num_generation_tokens > count:
                    found.append(replica)
            return bool(found)

        wait_until(is_found)
        return found[0]

    def wait_until_idle(self) -> None:
        wait_until(lambda: all(replica.is_idle for replica in self.replicas))

    def num_cached_prompt_tokens(self) -> int:
        return sum(replica.loads().num_cached_prompt_tokens for replica in self.replicas)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """While the gateway starts, the model's files are gone: as in a cluster, it has to ask a replica for them."""
    model = tmp_path_factory.mktemp("models") / MODEL
    shutil.copytree(Path("models") / MODEL, model)
    own_port = free_port(HOST)
    replicas = [Replica(model, "--gateway", "--gateway-port", own_port), Replica(model)]
    try:
        for replica in replicas:
            replica.wait_until_ready()
            assert replica.tokenizer_bytes() > 10_000
        assert replicas[0].service.next_line() == ready_line(own_port)
        hidden = model.rename(model.with_name("hidden"))
        with Gateway([replica.address for replica in replicas], "--policy=cache_aware") as gateway:
            hidden.rename(model)
            yield Fleet(gateway, replicas, own_port)
    finally:
        for replica in replicas:
            replica.service.kill()


@pytest.fixture
def gateway(fleet: Fleet) -> Gateway:
    fleet.wait_until_idle()
    return fleet.gateway


def ready_line(port: int) -> str:
    return f"ready on http://127.0.0.1:{port}"


def direct(fleet: Fleet, prompt: str, max_tokens: int) -> str:
    with Client(fleet.replicas[0].address) as client:
        return client.complete(prompt, SamplingParams(temperature=0, max_tokens=max_tokens)).outputs[0].text


PROMPT = "Once there was a brave turtle"
GREEDY = {"model": MODEL, "temperature": 0, "max_tokens": 40}
CHAT = {"messages": [{"role": "user", "content": PROMPT}]}


def test_the_model_is_listed(gateway: Gateway) -> None:
    models = gateway.get("/v1/models")
    assert (models.status, [model["id"] for model in models.body["data"]]) == (200, [MODEL])


def test_the_gateway_of_serve_has_no_administrator(fleet: Fleet) -> None:
    """A worker that a stranger adds would get prompts. Its clients are served all the same."""
    for method, path in (("POST", "/workers"), ("GET", "/workers"), ("POST", "/flush_cache")):
        assert ask(fleet.own_port, method, path, {"url": "grpc://127.0.0.1:1"}).status == 401
    assert ask(fleet.own_port, "GET", "/v1/models", None).status == 200


def test_every_route_tells_the_same_story(fleet: Fleet, gateway: Gateway) -> None:
    story = direct(fleet, PROMPT, 40)
    completion = gateway.post("/v1/completions", prompt=PROMPT, **GREEDY)
    assert (completion.status, completion.text) == (200, story)
    assert completion.body["choices"][0]["finish_reason"] == "length"
    usage = completion.body["usage"]
    assert usage["completion_tokens"] == 40
    assert usage["total_tokens"] == usage["prompt_tokens"] + 40
    chat = gateway.post("/v1/chat/completions", **CHAT, **GREEDY)
    assert (chat.status, chat.text) == (200, story)
    response = gateway.post("/v1/responses", model=MODEL, temperature=0, input=PROMPT, max_output_tokens=40)
    assert response.status == 200
    assert response.body["output"][0]["content"][0]["text"] == story
    sampling = {"temperature": 0, "max_new_tokens": 40}
    generated = gateway.post("/generate", model=MODEL, text=PROMPT, sampling_params=sampling)
    assert (generated.status, generated.body[0]["text"]) == (200, story)
    token_ids = gateway.post("/v1/tokenize", model=MODEL, prompt=PROMPT).body["tokens"]
    generated = gateway.post("/generate", model=MODEL, input_ids=token_ids, sampling_params=sampling)
    assert (generated.status, generated.body[0]["text"]) == (200, story)


def test_streams_tell_it_piece_by_piece(fleet: Fleet, gateway: Gateway) -> None:
    story = direct(fleet, PROMPT, 40)
    stream = gateway.stream("/v1/chat/completions", stream_options={"include_usage": True}, **CHAT, **GREEDY)
    events = list(stream)
    assert stream.is_done
    pieces = [event["choices"][0]["delta"].get("content") or "" for event in events if event["choices"]]
    assert "".join(pieces) == story
    assert sum(map(bool, pieces)) > 10
    assert [event["choices"][0]["finish_reason"] for event in events if event["choices"]][-1] == "length"
    assert events[-1]["usage"]["completion_tokens"] == 40
    stream = gateway.stream("/v1/completions", prompt=PROMPT, **GREEDY)
    assert "".join(event["choices"][0]["text"] for event in stream if event["choices"]) == story
    stream = gateway.stream("/v1/responses", model=MODEL, temperature=0, input=PROMPT, max_output_tokens=40)
    deltas = [event["delta"] for event in stream if event["type"] == "response.output_text.delta"]
    assert "".join(deltas) == story


def test_a_conversation_goes_on(fleet: Fleet, gateway: Gateway) -> None:
    """The template of the bundled model: what was said, and an empty line before the user's next turn."""
    first = gateway.post("/v1/chat/completions", **CHAT, **GREEDY).text
    messages = [*CHAT["messages"], {"role": "assistant", "content": first}, {"role": "user", "content": "One day"}]
    second = gateway.post("/v1/chat/completions", messages=messages, **GREEDY)
    assert second.text == direct(fleet, f"{PROMPT}{first}\n\nOne day", 40)


def test_samples_stops_and_logprobs(gateway: Gateway) -> None:
    seeded = {"model": MODEL, "prompt": "The little", "temperature": 1.0, "seed": 7, "max_tokens": 30}
    samples = gateway.post("/v1/completions", n=3, **seeded).body["choices"]
    assert [sample["index"] for sample in samples] == [0, 1, 2]
    assert len({sample["text"] for sample in samples}) > 1
    assert gateway.post("/v1/completions", n=3, **seeded).body["choices"] == samples
    stopped = gateway.post("/v1/completions", model=MODEL, prompt="Once", temperature=0, max_tokens=500, stop=["named"])
    assert stopped.text.endswith("little fox ")
    assert stopped.body["choices"][0]["finish_reason"] == "stop"
    assert stopped.body["usage"]["completion_tokens"] < 20, "the engine itself must stop"
    chat = gateway.post("/v1/chat/completions", logprobs=True, top_logprobs=2, **CHAT, **GREEDY).body["choices"][0]
    content = chat["logprobs"]["content"]
    assert "".join(entry["token"] for entry in content) == chat["message"]["content"]
    for entry in content:
        assert entry["top_logprobs"][0]["token"] == entry["token"], "greedy takes the likeliest"
        assert entry["top_logprobs"][0]["logprob"] == entry["logprob"] >= entry["top_logprobs"][1]["logprob"]


def test_bad_requests_are_the_clients_fault(gateway: Gateway) -> None:
    cases = [
        (400, "n is 17, but must be 1 to 16", {"prompt": "Once", "n": 17}),
        (400, "maximum context length is 2048", {"prompt": "a fox " * 2000}),
        (400, "temperature", {"prompt": "Once", "temperature": -1}),
        (400, "a stop text has 257 characters", {"prompt": "Once", "stop": "x" * 257}),
        (404, "unknown", {"prompt": "Once", "model": "unknown"}),
    ]
    for status, text, fields in cases:
        answer = gateway.post("/v1/completions", **({"model": MODEL, "max_tokens": 4} | fields))
        assert (answer.status, text in answer.body["error"]["message"]) == (status, True), answer
    assert gateway.post("/v1/rerank", model=MODEL, query="Once", documents=["a"]).status == 501
    assert gateway.post("/submit", prompt="Once").status == 404


def test_one_command_serves_the_api(fleet: Fleet) -> None:
    """`pagewire serve --gateway`, which starts a gateway that died again."""
    service, port = fleet.replicas[0].service, fleet.own_port
    request = {"model": MODEL, "prompt": "Once", "temperature": 0, "max_tokens": 8}
    story = post(port, "/v1/completions", request)
    assert (story.status, story.text) == (200, " upon a time, there was a little")
    (gateway,) = [pid for pid in children_of(service.pid) if "gateway_process" in command_line(pid)]
    os.kill(gateway, signal.SIGKILL)
    assert service.next_line() == ready_line(port)
    assert post(port, "/v1/completions", request).text == story.text


LONG = {"model": MODEL, "prompt": PROMPT, "max_tokens": 1900, "ignore_eos": True, "seed": 1}


@pytest.mark.alone
@pytest.mark.parametrize("n", [1, 3])
def test_a_client_that_leaves_a_stream_frees_its_blocks(fleet: Fleet, gateway: Gateway, n: int) -> None:
    stream = gateway.stream("/v1/completions", n=n, **LONG)
    for _, _ in zip(stream, range(5), strict=False):
        pass
    assert not all(replica.is_idle for replica in fleet.replicas)
    num_before = sum(replica.loads().num_generation_tokens for replica in fleet.replicas)
    stream.close()
    fleet.wait_until_idle()
    num_after = sum(replica.loads().num_generation_tokens for replica in fleet.replicas)
    assert num_after - num_before < 1500 * n


@pytest.mark.alone
def test_a_client_that_leaves_before_the_answer_frees_its_blocks(fleet: Fleet, gateway: Gateway) -> None:
    num_before = sum(replica.loads().num_generation_tokens for replica in fleet.replicas)
    connection = http.client.HTTPConnection("127.0.0.1", gateway.port)
    send(connection, "POST", "/v1/completions", LONG)
    wait_until(lambda: not all(replica.is_idle for replica in fleet.replicas))
    connection.close()
    fleet.wait_until_idle()
    num_after = sum(replica.loads().num_generation_tokens for replica in fleet.replicas)
    assert num_after - num_before < 1500


def test_full_queues_are_429(fleet: Fleet, gateway: Gateway) -> None:
    message = scheduler_pb2.GenerateRequest(
        text=PROMPT, sampling={"n": MAX_NUM_SEQS, "max_tokens": 1900, "ignore_eos": True}
    )
    calls = [replica.stub.Generate(message) for replica in fleet.replicas]
    wait_until(lambda: all(replica.loads().num_running == MAX_NUM_SEQS for replica in fleet.replicas))
    calls += [replica.stub.Generate(message) for replica in fleet.replicas]
    wait_until(lambda: all(replica.loads().num_waiting == MAX_NUM_SEQS for replica in fleet.replicas))
    answer = gateway.post("/v1/completions", **LONG)
    assert answer.status == 429, answer
    assert "try again later" in answer.body["error"]["message"]
    for call in calls:
        call.cancel()
    fleet.wait_until_idle()
    assert gateway.post("/v1/completions", **(LONG | {"max_tokens": 4})).status == 200


ANIMALS = ("fox", "turtle", "cat", "owl", "rabbit", "bear", "mouse", "frog", "duck", "hen")


def test_prompts_follow_their_prefix(fleet: Fleet, gateway: Gateway) -> None:
    seed = 11
    print(f"seed {seed}")
    rng = random.Random(seed)
    assert gateway.post("/flush_cache").status == 200
    openings = [f"Once there was a {rng.choice(('brave', 'shy', 'kind'))} {animal}, so" for animal in ANIMALS]
    talks = [[{"role": "user", "content": opening}] for opening in openings]
    num_before = [replica.loads().num_prompt_tokens for replica in fleet.replicas]
    hits = []

    def turn(talk: list[dict[str, str]]) -> None:
        is_first = len(talk) == 1
        answer = gateway.post("/v1/chat/completions", model=MODEL, messages=talk, temperature=0, max_tokens=48)
        assert answer.status == 200
        if not is_first:
            hits.append(answer.num_cached_tokens >= answer.body["usage"]["prompt_tokens"] // 2)
        talk += [{"role": "assistant", "content": answer.text}, {"role": "user", "content": "And then"}]

    with ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            list(pool.map(turn, talks))
            time.sleep(0.1)  # the gateway hears of new blocks some milliseconds later; clients think longer than that
    assert len(hits) == 20
    assert sum(hits) >= 0.9 * len(hits)
    shares = [replica.loads().num_prompt_tokens - num for replica, num in zip(fleet.replicas, num_before, strict=True)]
    assert min(shares) > 0.1 * sum(shares), "both replicas take part"


def test_a_replica_that_dies_ends_its_streams_and_comes_back(fleet: Fleet, gateway: Gateway) -> None:
    stream = gateway.stream("/v1/completions", **LONG)
    assert stream.status == 200
    victim = fleet.busy()
    victim.kill()
    events = list(stream)
    assert "error" in events[-1]
    for i in range(8):
        assert gateway.post("/v1/completions", **(LONG | {"prompt": f"{i} foxes", "max_tokens": 4})).status == 200
    victim.start()
    victim.wait_until_ready()
    gateway.wait_for_replicas(2)

    def serves_again() -> bool:
        with ThreadPoolExecutor(4) as pool:
            statuses = pool.map(lambda i: gateway.post("/v1/completions", **one_of(i)).status, range(8))
            assert set(statuses) == {200}
        return victim.loads().num_generation_tokens > 0

    def one_of(i: int) -> dict[str, object]:
        return LONG | {"prompt": f"{time.monotonic()} times {i} foxes", "max_tokens": 20}

    wait_until(serves_again)


def test_without_replicas_it_is_503(fleet: Fleet, gateway: Gateway) -> None:
    children = [pid for replica in fleet.replicas for pid in children_of(replica.service.pid)]
    assert len(children) == 3, "two workers and a gateway"
    for replica in fleet.replicas:
        replica.service.send_signal(signal.SIGTERM)
    for replica in fleet.replicas:
        replica.stop()
    assert not [pid for pid in children if Path(f"/proc/{pid}").exists()]
    answer = gateway.post("/v1/completions", **LONG)
    assert answer.status == 503, answer


def command_line(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()


async def test_a_gateway_chooses_among_named_templates(tmp_path: Path) -> None:
    """As clients of our own do: the template for tools where there are tools, the default where there are none."""
    checkpoint = make_checkpoint(tmp_path / "model")
    named = {
        "default": "a {{ messages[0].content }}",
        "tool_use": "{% for t in tools %}{{ t.function.name }}{% endfor %}",
    }
    templates = [{"name": name, "template": template} for name, template in named.items()]
    (checkpoint / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates, "eos_token": "<end>"}))
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    tool = {"type": "function", "function": {"name": "a_long_name_of_a_tool", "parameters": {"type": "object"}}}
    messages = [{"role": "user", "content": "hello"}]
    async with serve(checkpoint) as stack, AsyncClient(stack.url) as client:
        gateway = Gateway([stack.url.removeprefix("grpc://")])
        try:
            await asyncio.to_thread(gateway.wait_until_ready)
            for tools, prompt in ((None, "a hello"), ([tool], "a_long_name_of_a_tool")):
                body = {"model": "model", "messages": messages, "max_tokens": 3} | ({"tools": tools} if tools else {})
                answer = await asyncio.to_thread(gateway.post, "/v1/chat/completions", **body)
                assert answer.status == 200, answer
                expected = len(tokenizer.encode(prompt, add_special_tokens=False).ids)
                assert answer.body["usage"]["prompt_tokens"] == expected
                own = await client.chat(messages, max_tokens=3, template_variables={"tools": tools})
                assert own.usage.prompt_tokens == expected
        finally:
            await asyncio.to_thread(gateway.stop)

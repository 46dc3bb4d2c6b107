"""The operations that keep states of sequences, in the C kernels: compared with kernels/states.py, and bit for bit
with other divisions of the same work."""

import random
from dataclasses import dataclass, fields

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_recurrent_gated_delta_rule

from pagewire.kernels.arguments import Scoring
from pagewire.kernels.cpu import VARIANTS, CpuKernels, DecoderKernel, PagedRows
from pagewire.kernels.states import StateRows, apply_delta_rule, convolve, normalize_gated
from pagewire.kernels.weight import StoredWeight
from pagewire.network.operations import Convolve, DeltaRule, Embed, LmHead, NormalizeGated
from testing.kernels.variants import load_variant

LENGTH = 97  # of the sequences that are computed in chunks


@pytest.fixture(params=[pytest.param(name, marks=[] if name == "avx2" else pytest.mark.thorough) for name in VARIANTS])
def kernels(request) -> CpuKernels:
    return load_variant(request.param)


class Model:
    """A list of operations whose first buffers, `x` and so on, are tables of inputs. Token i reads row i of a table."""

    def __init__(self, kernels: CpuKernels, inputs: dict[str, Tensor], operations: list) -> None:
        self.inputs, self.operations = inputs, operations
        width = len(self.reference(torch.empty(0, dtype=torch.int64), None).t())
        head = LmHead(operations[-1].output, kernels.pack_linear(StoredWeight(torch.eye(width))))
        embeds = [Embed(name, table) for name, table in inputs.items()]
        self.kernel = DecoderKernel(kernels, [*embeds, *operations, head])

    @property
    def state_size(self) -> int:
        return sum(map(num_values, self.operations))

    def run(self, tokens: Tensor, rows: StateRows, num_threads: int = 1) -> Tensor:
        """Return the output of the last operation, and update the states. The logits are computed, so that a step has
        enough work for several threads."""
        before, num_rows = torch.get_num_threads(), len(rows.reads)
        paged = PagedRows(
            rows.query_start_loc,
            torch.ones(num_rows, dtype=torch.int32),
            torch.zeros(1, num_rows, 1).int(),
            tokens[None],
        )
        torch.set_num_threads(num_threads)
        try:
            caches = [(torch.zeros(2, 16, 1, 4),) * 2]
            every = torch.arange(len(tokens))
            return self.kernel.forward(tokens, tokens, every, paged, [Scoring(1.0)], caches, states=rows)[0]
        finally:
            torch.set_num_threads(before)

    def reference(self, tokens: Tensor, rows: StateRows | None) -> Tensor:
        """Compute the same in plain torch."""
        rows = rows or step([], torch.zeros(1, self.state_size))
        buffers, offset = {name: table[tokens] for name, table in self.inputs.items()}, 0
        for operation in self.operations:
            x = buffers[operation.input]
            match operation:
                case Convolve(weight=weight, kernel_size=size, bias=bias, is_gated=is_gated):
                    y = convolve(x, weight.view(-1, size), bias, rows, offset, is_gated=is_gated)
                case DeltaRule(gate=gate, decay=decay, bias=bias, num_key_heads=num_key_heads, key_dim=key_dim):
                    sizes = {"num_key_heads": num_key_heads, "key_dim": key_dim}
                    y = apply_delta_rule(x, buffers[gate], decay, bias, rows, offset, **sizes)
                case NormalizeGated(gate=gate, weight=weight, eps=eps):
                    y = normalize_gated(x, buffers[gate], weight, eps)
            buffers[operation.output], offset = y, offset + num_values(operation)
        return y


def num_values(operation) -> int:
    """Return the number of values in a state of an operation with weights."""
    match operation:
        case Convolve(weight=weight, kernel_size=size):
            return weight.numel() // size * (size - 1)
        case DeltaRule(num_heads=num_heads, key_dim=key_dim, value_dim=value_dim):
            return num_heads * key_dim * value_dim
    return 0


def step(rows: list[tuple[int, int, list[tuple[int, int]]]], states: Tensor) -> StateRows:
    """Return the rows of a step from (number of tokens, state read, saves)."""

    def ints(values):
        return torch.tensor(values, dtype=torch.int32)

    nums, reads, saves = zip(*rows, strict=True) if rows else ((), (), ())
    flat = [save for each in saves for save in each]
    return StateRows(
        states,
        ints([0, *nums]).cumsum(0, dtype=torch.int32),
        ints(reads),
        ints([0, *map(len, saves)]).cumsum(0, dtype=torch.int32),
        ints([count for count, _ in flat]),
        ints([state for _, state in flat]),
    )


def random_step(rng: random.Random, nums: list[int], states: Tensor) -> StateRows:
    """Return rows with these numbers of tokens, most of which save several states, some of them the one they read."""
    free = list(range(1, len(states)))
    rng.shuffle(free)
    rows = []
    for num in nums:
        read, final = free.pop(), free.pop()
        counts = rng.sample(range(num), rng.randrange(min(num, 3) + 1))
        saves = [(count, free.pop()) for count in sorted(counts)] + [(num, final)]
        if rng.random() < 0.5:
            at = rng.randrange(len(saves))
            saves[at] = (saves[at][0], read)
        rows.append((num, 0 if rng.random() < 0.2 and all(state != read for _, state in saves) else read, saves))
    return step(rows, states)


@dataclass(frozen=True)
class Sizes:
    """The sizes of a layer: a convolution, the delta rule and its gated norm."""

    num_heads: int
    num_key_heads: int
    key_dim: int
    value_dim: int
    kernel_size: int
    has_bias: bool = False

    def layer(self, kernels: CpuKernels, num_tokens: int, seed: int) -> Model:
        torch.manual_seed(seed)
        width = self.num_heads * self.value_dim
        mixed = 2 * self.num_key_heads * self.key_dim + width
        inputs = {"x": torch.randn(num_tokens, mixed), "gates": torch.randn(num_tokens, 2 * self.num_heads) * 2}
        bias = torch.randn(mixed) if self.has_bias else None
        decay, rate = -torch.rand(self.num_heads) - 0.01, torch.randn(self.num_heads)
        sizes = self.num_heads, self.num_key_heads, self.key_dim, self.value_dim
        operations = [
            Convolve("x", "mixed", torch.randn(mixed * self.kernel_size) / 2, self.kernel_size, bias),
            DeltaRule("mixed", "gates", "read", *sizes, decay, rate),
            NormalizeGated("read", "z", "normed", torch.randn(self.value_dim), 1e-6),
            Convolve("thirds", "last", torch.randn(24), 3, is_gated=True),
        ]
        inputs |= {"z": torch.randn(num_tokens, width), "thirds": torch.randn(num_tokens, 24)}
        return Model(kernels, inputs, [operations[3], *operations[:3]])


def test_convolutions_equal_the_reference(kernels):
    for seed in range(12):
        print("seed", seed)
        rng = random.Random(seed)
        torch.manual_seed(seed)
        width, kernel_size, is_gated = rng.choice([8, 13, 64, 150]), rng.randrange(2, 8), seed % 2 == 1
        bias = torch.randn(width) if rng.random() < 0.5 else None
        nums = [rng.randrange(1, 20) for _ in range(rng.randrange(1, 5))]
        inputs = {"x": torch.randn(sum(nums), width * (3 if is_gated else 1))}
        weight = torch.randn(width * kernel_size)
        model = Model(kernels, inputs, [Convolve("x", "y", weight, kernel_size, bias, is_gated)])
        compare(model, rng, nums)


def test_delta_rules_equal_the_reference(kernels):
    for seed in range(12):
        print("seed", seed)
        rng = random.Random(seed)
        num_key_heads, repeats = rng.choice([1, 2, 3]), rng.choice([1, 2])
        dims = [rng.choice([16, 24, 33, 64, 128]), rng.choice([16, 20, 37, 64, 128])]
        if seed == 0:
            dims = [256, 256]
        sizes = Sizes(num_key_heads * repeats, num_key_heads, *dims, rng.randrange(2, 8), rng.random() < 0.5)
        print(sizes)
        nums = [rng.randrange(1, 12) for _ in range(rng.randrange(1, 4))]
        compare(sizes.layer(kernels, sum(nums), seed), rng, nums)


def compare(model: Model, rng: random.Random, nums: list[int]) -> None:
    """Compare one random step with the reference."""
    states = torch.randn(6 * len(nums) + 1, model.state_size) * 0.5
    states[0] = 0
    rows = random_step(rng, nums, states.clone())
    expected = StateRows(states, *[getattr(rows, field.name) for field in fields(StateRows)[1:]])
    tokens = torch.arange(sum(nums))
    torch.testing.assert_close(model.run(tokens, rows), model.reference(tokens, expected), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(rows.states, expected.states, rtol=1e-4, atol=2e-5)
    assert not rows.states[0].any()


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize(
    "sizes", [Sizes(8, 4, 64, 128, 4), Sizes(6, 3, 33, 37, 5, has_bias=True)], ids=["whole tiles", "parts"]
)
def test_chunks_and_company_do_not_change_bits(kernels, sizes, num_threads):
    """The states and outputs after each token are those of a step with all tokens, whatever the steps are."""
    model = sizes.layer(kernels, 2 * LENGTH, seed=1)
    states = torch.zeros(LENGTH + 1, model.state_size)
    outputs = model.run(torch.arange(LENGTH), step([(LENGTH, 0, [(n, n) for n in range(1, LENGTH + 1)])], states))
    for seed in range(6):
        print("seed", seed)
        rng = random.Random(seed)
        chunk_size, start, read = [1, 2, 7, 30, 96, 97][seed], 0, 0
        own = torch.zeros(8, model.state_size)
        while start < LENGTH:
            num = min(LENGTH - start, rng.randint(1, chunk_size) if seed % 2 else chunk_size)
            last, middle = rng.choice([1, 2, 3]), rng.randrange(num)
            rows = [(num, read, [(middle, 4), (num, last)])]
            tokens = [torch.arange(start, start + num)]
            for other in range(rng.randrange(3)):  # other rows, in front and behind
                other_num = rng.choice([1, 5, 20])
                place = rng.randrange(len(rows) + 1)
                rows.insert(place, (other_num, 5 + other, [(other_num, 5 + other)]))
                tokens.insert(place, torch.randint(LENGTH, 2 * LENGTH, (other_num,)))
            actual = model.run(torch.cat(tokens), step(rows, own), num_threads).split([num for num, *_ in rows])
            (place,) = [index for index, (_, _, saves) in enumerate(rows) if len(saves) == 2]
            assert torch.equal(actual[place], outputs[start : start + num])
            assert torch.equal(own[last], states[start + num])
            assert torch.equal(own[4], states[start + middle])
            start, read = start + num, last


def test_steps_with_repeated_tasks_update_states_once(cpu_kernels):
    """Many threads share few cores, so threads wait for tasks of others, and repeat those that are repeatable."""
    model = Sizes(16, 16, 64, 64, 4).layer(cpu_kernels, 8, seed=2)
    states = torch.zeros(9, model.state_size)
    rows = step([(1, n, [(1, n)]) for n in range(1, 9)], states)
    expected = [model.run(torch.arange(8), rows) for _ in range(40)]
    after = states.clone()
    states.zero_()
    for each in expected:
        assert torch.equal(model.run(torch.arange(8), rows, num_threads=6), each)
    assert torch.equal(states, after)


def test_states_are_as_exact_as_those_of_transformers(cpu_kernels):
    """The distance to a float64 recurrence is not larger than the distance of transformers' recurrence in float32."""
    sizes = Sizes(4, 2, 128, 128, 4)
    model = sizes.layer(cpu_kernels, 600, seed=3)
    rule = model.operations[2]
    model = Model(cpu_kernels, {"mixed": model.inputs["x"], "gates": model.inputs["gates"]}, [rule])
    states = torch.zeros(2, model.state_size)
    model.run(torch.arange(600), step([(600, 0, [(600, 1)])], states))

    def recurrence(dtype):
        x, (b, a) = model.inputs["mixed"].to(dtype), model.inputs["gates"].to(dtype).chunk(2, dim=1)
        query, key = (each.unflatten(1, (2, 128)).repeat_interleave(2, 1) for each in x[:, :512].chunk(2, dim=1))
        query, key = (each * torch.rsqrt(each.square().sum(-1, keepdim=True) + 1e-6) for each in (query, key))
        decay = rule.decay.to(dtype) * torch.nn.functional.softplus(a + rule.bias.to(dtype))
        query, key, value = (each[None] for each in (query, key, x[:, 512:].unflatten(1, (4, 128))))
        return query, key, value, decay[None], b.sigmoid()[None]

    _, single_state = torch_recurrent_gated_delta_rule(*recurrence(torch.float32), None, True)
    _, key, value, decay, beta = (each[0] for each in recurrence(torch.float64))
    state = torch.zeros(4, 128, 128, dtype=torch.float64)
    for token in range(600):
        state *= decay[token].exp()[:, None, None]
        change = beta[token][:, None] * (value[token] - torch.einsum("hkv,hk->hv", state, key[token]))
        state += key[token][:, :, None] * change[:, None]
    errors = [(each.double() - state).norm().item() for each in (states[1].view(4, 128, 128), single_state[0])]
    print("errors", errors)
    assert errors[0] <= errors[1]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"kernel_size": 17, "weight": torch.ones(17 * 16)}, "a kernel of 17 inputs; 2 to 16 are supported"),
        ({"weight": torch.ones(60)}, r"weight is torch.float32 \(4, 15\); it must be torch.float32 \(4, 16\)"),
        ({"bias": torch.ones(3)}, r"bias is torch.float32 \(3,\)"),
        ({"is_gated": True}, "buffer x is 16 wide: not 3 parts of one width"),
    ],
)
def test_convolutions_that_do_not_fit_are_refused(cpu_kernels, changed, message):
    fitting = {"input": "x", "output": "y", "weight": torch.ones(64), "kernel_size": 4}
    head = LmHead("y", cpu_kernels.pack_linear(StoredWeight(torch.eye(16))))
    with pytest.raises(ValueError, match=message):
        DecoderKernel(cpu_kernels, [Embed("x", torch.ones(2, 16)), Convolve(**fitting | changed), head])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_key_heads": 3}, "4 value heads cannot share 3 key heads of 8"),
        ({"key_dim": 1024}, "the size is at most 512"),
        ({"value_dim": 9}, "buffer x is 64; 68 is read from it"),
        ({"gate": "x"}, "buffer x is 64; 8 is read from it"),
        ({"decay": torch.ones(2)}, r"decay is torch.float32 \(2,\); it must be torch.float32 \(4,\)"),
    ],
)
def test_delta_rules_that_do_not_fit_are_refused(cpu_kernels, changed, message):
    sizes = {"num_heads": 4, "num_key_heads": 2, "key_dim": 8, "value_dim": 8}
    fitting = {"input": "x", "gate": "g", "output": "y", **sizes, "decay": torch.ones(4), "bias": torch.ones(4)}
    embeds = [Embed("x", torch.ones(2, 64)), Embed("g", torch.ones(2, 8))]
    head = LmHead("y", cpu_kernels.pack_linear(StoredWeight(torch.eye(32))))
    with pytest.raises(ValueError, match=message):
        DecoderKernel(cpu_kernels, [*embeds, DeltaRule(**fitting | changed), head])


def test_states_that_do_not_fit_are_refused(cpu_kernels):
    model = Model(cpu_kernels, {"x": torch.ones(2, 16)}, [Convolve("x", "y", torch.ones(64), 4)])
    fitting, tokens = step([(2, 0, [(2, 1)])], torch.zeros(2, 48)), torch.arange(2)
    model.run(tokens, fitting)
    columns = {field.name: getattr(fitting, field.name) for field in fields(StateRows)}
    for changed, message in [
        ({"states": torch.zeros(2, 49)}, r"states are \(2, 49\) for a model with 48 values"),
        ({"states": torch.zeros(2, 48).half()}, "states is torch.float16"),
        ({"save_counts": columns["save_counts"][:0]}, "0 save_counts come with .* 1 save_states"),
        ({"reads": columns["reads"].long()}, "reads is torch.int64"),
    ]:
        with pytest.raises(ValueError, match=message):
            model.run(tokens, StateRows(**columns | changed))
    paged = PagedRows.of([0, 2], [2], torch.tensor([[[1]]]), tokens[None])
    with pytest.raises(ValueError, match="the model has states, but the step has none"):
        model.kernel.forward(tokens, tokens, tokens, paged, [Scoring(1.0)], [(torch.zeros(2, 16, 1, 4),) * 2])

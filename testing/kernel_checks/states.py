"""Checks of `pagewire.kernels.triton.states` against its specification, and its benchmarks."""

import functools
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pagewire.kernels import states as specification
from pagewire.kernels.states import StateRows
from pagewire.kernels.triton import states
from testing.kernel_checks.case import BenchCase, CompileCase, DeviceCase
from testing.kernel_checks.decode_attention import strided
from testing.kernel_checks.fused import EPS, STEPS, TRITON_TYPES, assert_same_rounding

# Largest difference from the specification in float32, as a share of the largest value: the order of the sums over
# keys and the last bits of exp differ, and the state sums up these differences over all tokens.
TOLERANCE = 2e-5
OFFSET, BEYOND = 16, 8  # values of a state in front of the operation's and behind them
NUM_STATES = 16

# The arguments of an operation up to the rows: tensors with a line per token, then weights.
Inputs = Sequence[Tensor | None]


@dataclass(frozen=True)
class Convolution:
    """The sizes of a convolution, and whether it is gated and has a bias."""

    width: int
    kernel_size: int
    is_gated: bool = False
    has_bias: bool = False

    @property
    def state_size(self) -> int:
        return self.width * (self.kernel_size - 1)

    def draw_tokens(self, num_tokens: int, dtype: torch.dtype) -> list[Tensor]:
        """Return random inputs."""
        return [torch.randn(num_tokens, (3 if self.is_gated else 1) * self.width + 8).to(dtype)[:, :-8]]

    def draw_weights(self) -> list[Tensor | None]:
        return [torch.randn(self.width, self.kernel_size), torch.randn(self.width) if self.has_bias else None]

    def run(self, module: Any, inputs: Inputs, rows: StateRows) -> Tensor:
        return module.convolve(*inputs, rows, OFFSET, is_gated=self.is_gated)


@dataclass(frozen=True)
class DeltaRule:
    """The sizes of a gated delta rule."""

    num_heads: int
    num_key_heads: int
    key_dim: int
    value_dim: int

    @property
    def state_size(self) -> int:
        return self.num_heads * self.key_dim * self.value_dim

    def draw_tokens(self, num_tokens: int, dtype: torch.dtype) -> list[Tensor]:
        """Return random inputs and gates."""
        size = 2 * self.num_key_heads * self.key_dim + self.num_heads * self.value_dim
        x, gate = torch.randn(num_tokens, size + 8), 2 * torch.randn(num_tokens, 2 * self.num_heads + 8)
        return [x.to(dtype)[:, :-8], gate.to(dtype)[:, :-8]]

    def draw_weights(self) -> list[Tensor | None]:
        """Return the decay and the bias of each head. The last head forgets its state at once, because softplus is
        linear for large numbers. The first head keeps its state nearly unchanged, because softplus is nearly 0. An
        error of this softplus is multiplied by the largest usual decay."""
        decay, bias = -0.1 - torch.rand(self.num_heads), torch.randn(self.num_heads)
        bias[-1] = 22.0
        decay[0], bias[0] = -16.0, -14.0
        return [decay, bias]

    def run(self, module: Any, inputs: Inputs, rows: StateRows) -> Tensor:
        sizes = {"num_key_heads": self.num_key_heads, "key_dim": self.key_dim}
        return module.apply_delta_rule(*inputs, rows, OFFSET, **sizes)


Operation = Convolution | DeltaRule


def make_states(operation: Operation, device: torch.device, num_states: int = NUM_STATES) -> Tensor:
    """Return random states, of which state 0 is zero, as a view of a wider tensor."""
    states = torch.randn(num_states + 1, OFFSET + operation.state_size + BEYOND + 8)
    states[0] = 0
    return states.to(device)[:, :-8]


def make_rows(states: Tensor, plan: Sequence[tuple[int, Sequence[tuple[int, int]]]]) -> StateRows:
    """Return the rows of a step. Each entry of `plan` has the state that a row reads, and the numbers of new tokens
    after which it writes a state, with this state."""

    def column(numbers: list[int], first: int) -> Tensor:
        """Return a view of a longer tensor, so that its alignment varies."""
        return torch.tensor([7] * first + numbers, dtype=torch.int32, device=states.device)[first:]

    saves = [save for _, row_saves in plan for save in row_saves]
    starts, save_starts = [0], [0]
    for _, row_saves in plan:
        starts.append(starts[-1] + row_saves[-1][0])
        save_starts.append(save_starts[-1] + len(row_saves))
    return StateRows(
        states,
        column(starts, 0),
        column([read for read, _ in plan], 1),
        column(save_starts, 2),
        column([count for count, _ in saves], 3),
        column([state for _, state in saves], 4),
    )


def draw_plan(rng: random.Random, lengths: Sequence[int]) -> list[tuple[int, list[tuple[int, int]]]]:
    """Return rows with these numbers of new tokens. They read states that others may read too, or the state that they
    write first or last, and save after up to three more numbers of tokens, the first of which may be 0. Some are
    padding rows, which compute their tokens from state 0 and write nothing."""
    free = list(range(1, NUM_STATES + 1))
    rng.shuffle(free)
    shared = free.pop()
    plan = []
    for length in lengths:
        if rng.random() < 0.2:
            plan.append((0, [(length, 0)]))
            continue
        counts = sorted(rng.sample(range(length), min(length, rng.randrange(3))))
        saves = [(count, free.pop()) for count in (*counts, length)]
        read = rng.choice([0, shared, saves[0][1], saves[-1][1]])
        plan.append((read, saves))
    return plan


def assert_near(actual: Tensor, expected: Tensor, case: str) -> None:
    """Assert that results are equal up to `TOLERANCE`, and the rounding to their dtype."""
    assert actual.shape == expected.shape, f"{case}: {list(actual.shape)} is not {list(expected.shape)}"
    assert actual.dtype == expected.dtype, f"{case}: {actual.dtype} is not {expected.dtype}"
    if actual.numel() == 0:
        return
    wide = expected.double()
    error = (actual.cpu().double() - wide).abs()
    allowed = TOLERANCE * wide.abs().max() + STEPS[actual.dtype] * wide.abs()
    assert bool((error <= allowed).all()), f"{case}: off by {float(error.max())} of at most {float(wide.abs().max())}"


def check_operation(
    device: torch.device, dtype: torch.dtype, operation: Operation, lengths: Sequence[int], seed: int
) -> None:
    """Check an operation on rows with these numbers of new tokens. The specification runs on the CPU.

    All bits of a convolution's states, and of its gated outputs, equal the specification. No other values of the
    states change.
    """
    case = f"{operation} of {list(lengths)} tokens, {dtype}, seed {seed}"
    torch.manual_seed(seed)
    plan = draw_plan(random.Random(seed), lengths)
    inputs = [*operation.draw_tokens(sum(lengths), dtype), *operation.draw_weights()]
    before = make_states(operation, torch.device("cpu"))
    ours, theirs = before.to(device, copy=True), before.clone()
    expected = operation.run(specification, inputs, make_rows(theirs, plan))
    actual = operation.run(states, _moved(inputs, device), make_rows(ours, plan))
    found, written = ours.cpu(), sorted({state for _, saves in plan for _, state in saves})
    changed = torch.zeros(before.shape, dtype=torch.bool)
    changed[written, OFFSET : OFFSET + operation.state_size] = True
    assert torch.equal(found[~changed], before[~changed]), f"{case}: another value of the states changed"
    for state in written:
        assert_near(found[state], theirs[state], f"{case}: state {state}")
    assert_near(actual.cpu(), expected, case)
    if isinstance(operation, Convolution):
        assert torch.equal(found, theirs), f"{case}: the bits of states differ"
        assert torch.equal(actual.cpu(), expected) or not operation.is_gated, f"{case}: the bits of outputs differ"


def check_steps(
    device: torch.device, dtype: torch.dtype, operation: Operation, lengths: Sequence[int], seed: int
) -> None:
    """Check that a sequence whose tokens are divided into steps of these lengths has the same bits as in one step.

    In each of these steps there is another row in front of it. The sequence updates one state in place, and the bits of
    this state are compared after each step.
    """
    case = f"{operation} in steps of {list(lengths)}, {dtype}, seed {seed}"
    torch.manual_seed(seed)
    tokens, weights = operation.draw_tokens(sum(lengths), dtype), operation.draw_weights()
    other = operation.draw_tokens(2, dtype)
    values = make_states(operation, device, len(lengths) + 4)
    read, own, beside, *saved = range(1, len(values))
    ends = list(itertools.accumulate(lengths))
    rows = make_rows(values, [(read, list(zip(ends, saved, strict=False)))])
    expected = operation.run(states, _moved([*tokens, *weights], device), rows)
    for length, end, state in zip(lengths, ends, saved, strict=False):
        step = [torch.cat([first, each[end - length : end]]) for first, each in zip(other, tokens, strict=True)]
        rows = make_rows(values, [(0, [(2, beside)]), (read, [(length, own)])])
        actual = operation.run(states, _moved([*step, *weights], device), rows)
        assert torch.equal(actual[2:], expected[end - length : end]), f"{case}: outputs up to token {end} differ"
        part = values[[own, state], OFFSET : OFFSET + operation.state_size]
        assert torch.equal(*part), f"{case}: states after token {end} differ"
        read = own


def _moved(inputs: Inputs, device: torch.device) -> Inputs:
    return [None if tensor is None else tensor.to(device) for tensor in inputs]


def check_normalize_gated(
    device: torch.device,
    dtype: torch.dtype,
    weight_dtype: torch.dtype,
    num_tokens: int,
    num_heads: int,
    head_dim: int,
    seed: int,
) -> None:
    """Check `normalize_gated` on views of longer rows, including large gates of both signs."""
    case = f"normalize_gated of {num_tokens} x {num_heads} x {head_dim} {dtype}, {weight_dtype}, seed {seed}"
    torch.manual_seed(seed)
    x, gate = (3 * torch.randn(2, num_tokens, num_heads * head_dim + 8, device=device)).to(dtype)[..., :-8]
    gate[0, 0], gate[-1, -1] = -200.0, 200.0
    weight = (1 + 0.1 * torch.randn(head_dim, device=device)).to(weight_dtype)
    actual = states.normalize_gated(x, gate, weight, EPS)
    assert_same_rounding(actual, specification.normalize_gated(x, gate, weight, EPS), case)


# Sizes of LFM2-1.2B, Qwen3.5-0.8B and Qwen3.5-4B.
GATED, PLAIN = Convolution(2048, 3, is_gated=True), Convolution(8192, 4)
DELTA_RULES = (DeltaRule(16, 16, 128, 128), DeltaRule(32, 16, 128, 128))


def device_cases() -> Iterator[DeviceCase]:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for operation in (GATED, PLAIN, Convolution(100, 8, has_bias=True), *DELTA_RULES, DeltaRule(3, 1, 96, 200)):
            for check, lengths in ((check_operation, (1, 70, 1, 33)), (check_steps, (33, 1, 1, 70))):
                arguments = {"dtype": dtype, "operation": operation, "lengths": lengths, "seed": 1}
                name = f"states: {check.__name__} {operation} {dtype}"
                yield DeviceCase(name, functools.partial(check, **arguments))
        for weight_dtype in dict.fromkeys((dtype, torch.float32)):
            for shape in ((1, 16, 128), (515, 32, 128), (7, 3, 80)):
                check = functools.partial(_check_norm, dtype, weight_dtype, *shape)
                yield DeviceCase(f"states: normalize_gated {shape} {dtype} {weight_dtype}", check)


def _check_norm(dtype: torch.dtype, weight_dtype: torch.dtype, *shape: int, device: torch.device) -> None:
    check_normalize_gated(device, dtype, weight_dtype, *shape, seed=2)


def bench_cases() -> Iterator[BenchCase]:
    """Yield benchmarks of one layer of LFM2-1.2B or Qwen3.5-4B, in decode steps and in a prefill of one sequence."""
    for operation, name in ((GATED, "gated convolution"), (PLAIN, "convolution"), (DELTA_RULES[1], "delta rule")):
        for num_rows, num_tokens in ((1, 1), (64, 1), (1, 4096)):
            [first, *_] = operation.draw_tokens(1, torch.bfloat16)
            num_bytes = 8 * num_rows * operation.state_size + 3 * num_rows * num_tokens * first.shape[1]
            make = functools.partial(_make_bench, operation, num_rows, num_tokens)
            yield BenchCase(f"states: {name}, {num_rows} x {num_tokens}", make, bytes_moved=num_bytes)


def _make_bench(
    operation: Operation, num_rows: int, num_tokens: int, device: torch.device
) -> Sequence[Callable[[], object]]:
    values = make_states(operation, device, num_rows)
    inputs = [*operation.draw_tokens(num_rows * num_tokens, torch.bfloat16), *operation.draw_weights()]
    rows = make_rows(values, [(row, [(num_tokens, row)]) for row in range(1, num_rows + 1)])
    return [functools.partial(operation.run, states, _moved(inputs, device), rows)]


def compile_cases() -> Iterator[CompileCase]:
    rows = dict.fromkeys(("query_start_loc", "reads", "save_start_loc", "save_counts", "save_states"), "*i32")
    rows = {"states": strided("fp32", 2), **rows}
    for dtype in (torch.bfloat16, torch.float32):  # float16 uses the same code as bfloat16
        x = TRITON_TYPES[dtype]
        tokens, output = {"x": strided(x[1:], 2)}, {"output": x}
        for operation in (GATED, PLAIN, Convolution(100, 8, has_bias=True)):
            bias = {"bias": "*fp32" if operation.has_bias else None}
            constants = states.ConvolutionConstants(operation.width, operation.kernel_size, 128, operation.is_gated)
            signature = {**tokens, "weight": "*fp32", **bias, **output, **rows}
            name = f"states: {operation} {dtype}"
            kernel, constexprs = states._convolve_kernel, {"SHAPE": constants}
            yield CompileCase(name, kernel, signature, constexprs, divisible_by_16=("strides",))
        for rule in (*DELTA_RULES, DeltaRule(3, 1, 96, 200), DeltaRule(4, 4, 256, 256)):
            padded_keys = rule.key_dim + -rule.key_dim % 128
            sizes = (rule.num_heads, rule.num_key_heads, rule.key_dim, padded_keys, rule.value_dim)
            constants = states.DeltaConstants(*sizes, 1024 // padded_keys)
            signature = {**tokens, "gate": strided(x[1:], 2), "head_numbers": ("*fp32", "*fp32"), **output, **rows}
            name = f"states: {rule} {dtype}"
            kernel, constexprs = states._delta_rule_kernel, {"SHAPE": constants}
            yield CompileCase(name, kernel, signature, constexprs, num_warps=1, divisible_by_16=("strides",))
        for weight in dict.fromkeys((x, "*fp32")):
            signature = {**tokens, "gate": strided(x[1:], 2), "weight": weight, **output, "eps": "fp32"}
            constexprs = {"NUM_HEADS": 32, "HEAD_DIM": 128, "PADDED_DIM": 128, "TILE_HEADS": 8}
            name = f"states: normalize_gated {dtype} by {weight}"
            yield CompileCase(name, states._normalize_gated_kernel, signature, constexprs)

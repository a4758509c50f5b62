"""Rules about machines and installations: what no other configuration would have avoided."""

from __future__ import annotations

import re

from tuner.failures.rule import EXACT, FAMILY, Case, Judgement, Rule, rule
from tuner.records import Verdict

_SHARED = re.compile(r"(?i)shm|shared memory|\b(?:psm_|sem\.|nccl-)\w")
_I, _T, _E, _H = Verdict.INFEASIBLE, Verdict.TRANSIENT, Verdict.ENV, Verdict.HARNESS


def _cache(case: Case, judgement: Judgement) -> Judgement:
    """A private cache settles whether the cache was at fault; after that it is the compiler or the configuration."""
    if case.facts.retries:
        return judgement.but(
            kind="compile-failed",
            verdict=_I,
            explanation="torch.compile fails for this configuration, with a fresh cache too.",
            remedy="Return compilation settings to their defaults, or use --enforce-eager.",
            moves={"compilation-config": "off", "enforce-eager": "on"},
        )
    return judgement


def _no_space(case: Case, judgement: Judgement) -> Judgement:
    """/dev/shm is a file system too, and full for another reason; Python and NCCL name its files without it."""
    if _SHARED.search(case.match.string):
        return judgement.but(
            kind="shared-memory-full",
            explanation="/dev/shm is full; vLLM's processes and NCCL talk through it.",
            remedy="Remove leftovers in /dev/shm (`psm_*`, `nccl-*`), or give the container more: `--shm-size 16g`.",
        )
    return judgement


RULES: tuple[Rule, ...] = (
    # --- hardware ----------------------------------------------------------------------------------------------
    rule(
        "gpu-hardware",
        _E,
        r"uncorrectable ECC|ECC error|cudaErrorECCUncorrectable|\bXid\b|fallen off the bus|GPU is lost|"
        r"cudaErrorHardwareStackError",
        r"unspecified launch failure|NVML_ERROR_GPU_IS_LOST|row remap|cudaErrorNvlinkUncorrectable|MMU Fault",
        explanation="The GPU itself reported a fault.",
        remedy="Check `nvidia-smi -q` and `dmesg | grep -i xid`; reset or replace the GPU. The study pauses.",
        weight=EXACT,
    ),
    rule(
        "gpu-unavailable",
        _E,
        r"No CUDA GPUs are available|no CUDA-capable device|Found no NVIDIA driver|Failed to infer device type|"
        r"NVML: Driver/library version mismatch",
        r"CUDA driver version is insufficient|driver on your system is too old|forward compatibility was attempted",
        r"no kernel image is available for execution|is not compatible with the current PyTorch installation",
        r"system not yet initialized|cudaErrorSystemNotReady|device\(s\) is/are busy or unavailable|"
        r"device kernel image is invalid",
        r"PTX was compiled with an unsupported toolchain|unsupported toolchain|cudaErrorUnsupportedPtxVersion",
        explanation="vLLM cannot use a GPU on this machine: driver, CUDA build and device do not go together, or none "
        "is "
        "visible.",
        remedy="Check `nvidia-smi`, CUDA_VISIBLE_DEVICES, and that the driver is new enough for this build of PyTorch.",
    ),
    # --- communication -----------------------------------------------------------------------------------------
    rule(
        "nccl",
        _E,
        r"nccl\w{0,40}Error|NCCL error|NCCL (?:Error|failure)|ncclSystemError|unhandled system error|"
        r"ProcessGroupNCCL.{0,120}(?:timeout|exception)",
        r"(?i)Error while creating shared memory segment|custom_all_reduce\.cu|\bNVLS\b|nvlink.{0,40}error",
        explanation="The GPUs of one replica could not talk to each other. It hits every configuration with more than "
        "one "
        "GPU a replica and says nothing about this one.",
        remedy="Check /dev/shm size, NCCL_DEBUG=INFO, peer-to-peer and IOMMU settings (NCCL_P2P_DISABLE=1 as a test).",
    ),
    rule(
        "rendezvous",
        _T,
        r"EADDRINUSE|The server socket has failed to listen|Could not find open port",
        explanation="A port that vLLM uses inside (not the one it serves on) was taken.",
        remedy="Try again with other ports; unset VLLM_PORT or give each server its own.",
        weight=EXACT,
    ),
    rule(
        "rendezvous",
        _T,
        r"DistNetworkError|DistStoreError|TCPStore|connectFullMesh|wait timeout after \d+ms|"
        r"Timed out after \d+ seconds waiting for clients",
        r"recvValue failed|Gloo connect|Broken pipe.{0,60}store",
        explanation="vLLM's own processes did not find each other.",
        remedy="Check that the host name resolves to a local address (VLLM_HOST_IP), then try again.",
    ),
    rule(
        "port-in-use",
        _T,
        r"Address already in use|address already in use|\[Errno 98\]|Errno 48",
        explanation="Another process listens on the port; possibly an earlier server that has not gone yet.",
        remedy="Take another free port, and make sure that the process that answers is ours.",
    ),
    rule(
        "bad-address",
        _H,
        r"\[Errno 99\]|[Cc]annot assign requested address|Name or service not known|gaierror",
        explanation="The address to listen on or to reach does not exist on this machine.",
        remedy="Correct --host (127.0.0.1), or the host name's entry.",
    ),
    rule(
        "folder-gone",
        _E,
        r"getcwd(?:\(\))?(?: failed|: cannot access)|cannot access parent directories",
        explanation="The folder in which vLLM was started had been removed.",
        remedy="Start again in a folder that stays.",
        weight=EXACT,
    ),
    # --- disk, limits, permissions -----------------------------------------------------------------------------
    rule(
        "disk-full",
        _E,
        r"Insufficient space in \S+ for|No space left on device|\[Errno 28\]|[Dd]isk quota exceeded|\[Errno 122\]|"
        r"not enough free disk space",
        explanation="A file system is full.",
        remedy="Free space in the results folder, the model cache and the compile cache; the study resumes then.",
        weight=EXACT,
        judge=_no_space,
    ),
    rule(
        "read-only",
        _E,
        r"Read-only file system|\[Errno 30\]",
        explanation="vLLM had to write where writing is not allowed.",
        remedy="Point VLLM_CACHE_ROOT, HF_HOME and TMPDIR to writable folders.",
    ),
    rule(
        "limits",
        _E,
        r"\[Errno 24\]|Too many open files(?!`)|can't start new thread|[Tt]hread creation failed|pthread_create|"
        r"\[Errno 11\] Resource",
        explanation="A limit of the operating system was reached (open files, threads or processes).",
        remedy="Raise `ulimit -n` and `ulimit -u`; look for leftover processes.",
    ),
    rule(
        "permission",
        _E,
        r"Permission denied|\[Errno 13\]|PermissionError|Operation not permitted",
        explanation="vLLM was not allowed to read, write or open something that it needs.",
        remedy="Correct the owner or mode of the path in the message.",
    ),
    # --- model ---------------------------------------------------------------------------------------------------
    rule(
        "trust-remote-code",
        _H,
        r"(?:execute|custom code).{0,200}trust_remote_code|--trust-remote-code",
        r"(?:pass|set|setting|option)\W{1,8}(?:the )?(?:argument|option)?\W{0,4}trust_remote_code=True",
        explanation="The model brings its own Python code, which vLLM runs only when told to. The tuner never says so "
        "for "
        "you: it is a decision about whom you trust.",
        remedy="Read the model's code; then add `-- --trust-remote-code` to your own command if you agree.",
    ),
    rule(
        "model-access",
        _E,
        r"GatedRepoError|gated repo|Access to model \S+ is restricted|401 Client Error|403 Client Error|"
        r"Invalid user token|Unauthorized",
        explanation="The model hub refused access.",
        remedy="Accept the model's terms on its page, and set HF_TOKEN.",
    ),
    rule(
        "model-not-found",
        _H,
        r"RepositoryNotFoundError|RevisionNotFoundError|404 Client Error|Repo id must be in the form|HFValidationError|"
        r"EntryNotFoundError(?<!LocalEntryNotFoundError)",
        r"Invalid repository ID or local directory specified|is not a local folder and is not a valid model identifier|"
        r"does not appear to have a file named config\.json|No supported config format found",
        r"NotADirectoryError.{0,200}|No such file or directory: '[^']*(?:config\.json|\.safetensors|tokenizer[^']*)'",
        explanation="There is no such model: neither a folder with a config.json nor a name on the hub.",
        remedy="Correct --model: an existing folder, or `owner/name`.",
    ),
    rule(
        "model-not-downloaded",
        _E,
        r"LocalEntryNotFoundError|OfflineModeIsEnabled|outgoing traffic has been disabled|couldn't connect to|"
        r"We couldn't connect",
        r"MaxRetryError|ConnectTimeout|ReadTimeout|NewConnectionError|NameResolutionError|"
        r"Temporary failure in name resolution|429 Client Error|5\d\d Server Error",
        explanation="The model is not on this machine and could not be downloaded now.",
        remedy="Download it first (`hf download NAME`), or pass the path of a local copy.",
    ),
    rule(
        "weights-missing",
        _H,
        r"Cannot find any (?:safetensors )?model weights|Weight files referenced in index but missing|"
        r"no file named .{0,80}(?:safetensors|pytorch_model)",
        explanation="The model folder holds no weights.",
        remedy="Complete the download; for a folder without weights, `--load-format dummy` runs random ones.",
    ),
    rule(
        "weights-corrupt",
        _E,
        r"SafetensorError|HeaderTooLarge|MetadataIncompleteBuffer|InvalidHeader|PytorchStreamReader|invalid load key|"
        r"file not a database",
        explanation="A weight file cannot be read: an incomplete download, or a Git LFS pointer instead of the file.",
        remedy="Download the model again and compare checksums.",
    ),
    rule(
        "weights-mismatch",
        _H,
        r"were not initialized from (?:the )?checkpoint|size mismatch for|"
        r"Attempted to load weight .{0,80} into parameter|There is no module or parameter named",
        r"KeyError: '(?:model\.)?layers\.\d+",
        explanation="The weights do not belong to this architecture or precision.",
        remedy="Check that config.json and the weights are of one revision, and --quantization and --hf-overrides.",
    ),
    rule(
        "architecture-unknown",
        _H,
        r"Model architectures? \[?.{0,120}\]? (?:are|is) not supported|does not recognize this architecture|"
        r"Cannot find model module|has no vLLM implementation",
        r"failed to be inspected|No model architectures? (?:are|is) specified",
        explanation="This vLLM does not know the model's architecture.",
        remedy="Use a vLLM (and transformers) that supports it.",
    ),
    rule(
        "tokenizer",
        _H,
        r"(?i)can't load tokenizer|couldn't instantiate the backend tokenizer|tokenizer class \S+ does not exist|"
        r"failed to load (?:the )?tokenizer|sentencepiece.{0,40}(?:not|install)",
        r"data did not match any variant of untagged enum|ModelWrapper",
        explanation="The model's tokenizer could not be loaded.",
        remedy="Check tokenizer.json in the model folder, or name another with --tokenizer.",
    ),
    rule(
        "model-files",
        _H,
        r"JSONDecodeError|is not a valid JSON file|Unrecognized model in|Invalid JSON|Expecting value: line \d+",
        explanation="A file of the model (or a JSON flag) is not valid.",
        remedy="Correct the file or flag that the message names.",
    ),
    # --- installation --------------------------------------------------------------------------------------------
    rule(
        "broken-install",
        _E,
        r"ModuleNotFoundError|ImportError|undefined symbol|cannot open shared object file|GLIBC\w*_[\d.]+' not found|"
        r"partially initialized module",
        r"has no attribute '_C|object has no attribute '\w+' .{0,40}torch\.ops|No module named|DistributionNotFound|"
        r"PackageNotFoundError",
        r"numpy\.dtype size changed|_ARRAY_API not found|command not found",
        explanation="The installation of vLLM is broken or incomplete.",
        remedy="Reinstall vLLM with matching PyTorch and CUDA packages in a fresh environment.",
    ),
    rule(
        "no-compiler",
        _E,
        r"Failed to find C compiler|Python\.h: No such file|Could not find nvcc|nvcc(?:: not found| not found)|"
        r"ninja.{0,40}not found|cannot find -lcuda|libcuda\.so cannot found",
        r"(?:gcc|cc1plus|clang).{0,60}(?:No such file|not found|fatal error)|CUDA_HOME environment variable is not set",
        r"CalledProcessError: Command.{0,60}(?:gcc|g\+\+|/cc'|nvcc|clang|ninja)|[Nn]inja build failed|"
        r"ninja: build stopped|Error building extension|nvcc fatal|Unsupported gpu architecture",
        explanation="Kernels are compiled at the start, and a compiler or its headers are missing or do not fit the "
        "GPU.",
        remedy="Install gcc, the Python headers (python3-dev) and, where named, a CUDA toolkit that knows this GPU.",
        weight=EXACT,
    ),
    rule(
        "cpu-too-old",
        _E,
        r"(?<!an )[Ii]llegal instruction|SIGILL",
        explanation="This build of vLLM uses instructions that this processor does not have.",
        remedy="Use a build for this processor (AVX2 instead of AVX-512), or another machine.",
    ),
    rule(
        "compile-cache",
        _T,
        r"corrupted compilation artifact|failed to get the hash of the compiled graph|[Cc]ache file corrupted|"
        r"torch_compile_cache.{0,200}(?:No such file|corrupt|EOF|Invalid|truncated)|(?:No such file|corrupt|EOF|"
        r"truncated).{0,300}torch_compile_cache",
        r"UnpicklingError|EOFError: Ran out of input|Artifact.{0,60}(?:missing|not found|mismatch)|"
        r"torch_aot_compile.{0,120}(?:fail|mismatch|corrupt)|(?i:failed to load.{0,60}(?:cache|artifact))",
        r"/(?:torchinductor_\w+|triton/cache|\.triton/cache|\.cache/vllm).{0,200}(?:No such file|not found)|"
        r"No such file or directory: '[^']*(?:torchinductor_|triton|inductor|torch_compile)",
        explanation="A cached compilation could not be used: half-written by a start that was killed, or from another "
        "build.",
        remedy="Start once with a private, empty cache (VLLM_CACHE_ROOT, TRITON_CACHE_DIR, TORCHINDUCTOR_CACHE_DIR).",
        judge=_cache,
    ),
    rule(
        "compile-failed",
        _T,
        r"InductorError|BackendCompilerFailed|torch\._dynamo\.exc\.\w+|LoweringException|triton\.compiler\.errors|"
        r"CompilationError|PTXASError|PassManager::run failed|ptxas",
        explanation="torch.compile or Triton failed while building kernels.",
        remedy="Try once with a private, empty compile cache.",
        weight=FAMILY,
        judge=_cache,
    ),
    rule(
        "forked-cuda",
        _H,
        r"Cannot re-initialize CUDA in forked subprocess|start a "
        r"new process before the current process has finished its bootstrapping",
        explanation="vLLM was started in a way in which its processes cannot use the GPU.",
        remedy="Set VLLM_WORKER_MULTIPROC_METHOD=spawn and start it from a plain shell command.",
    ),
    rule(
        "os-error",
        _E,
        r"^(?:\w+\.)*(?:OSError|IOError|FileNotFoundError|Connection\w*Error|BrokenPipeError|TimeoutError|HTTPError|"
        r"SSLError)\b",
        explanation="The operating system or the network refused something that vLLM needs.",
        remedy="Mend what the message names; it does not depend on the configuration.",
        weight=FAMILY,
    ),
)

COMPILER = Judgement(
    "compile-cache",
    _T,
    "An exception came out of compiled code or the compiler itself; a stale or half-written cache does that.",
    "Start once with a private, empty cache (VLLM_CACHE_ROOT, TRITON_CACHE_DIR, TORCHINDUCTOR_CACHE_DIR).",
)
"""For an unfamiliar exception whose innermost frame is the compiler's."""


def is_compiler_frame(frames: str) -> bool:
    """Whether a traceback ends in torch.compile, Inductor, or code that they generated."""
    last = frames.rpartition("\n")[2].replace("\\", "/")
    places = ("torch/_inductor/", "torch/_dynamo/", "torch_compile_cache/", "torchinductor_", "vllm/compilation/")
    return any(place in last for place in places)

"""Settings of the engine and the server, each declared once with its flag, help and default."""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, TypeVar

from mlx_mtp.errors import UsageError
from mlx_mtp.flags import (
    Flag,
    at_least,
    byte_size,
    duration,
    host_name,
    integer,
    nonempty_text,
    origin,
    template_kwargs,
    word_of,
    word_or,
)

MAX_DRAFT_TOKENS = 8  # maximum drafts of the head, per row and step
# Draft sources on the host (`speculative/host_sources.py`): the word for their drafts in the
# banner, and the banner's sentence about them.
HOST_DRAFTS = {
    "copy": ("copies", "text that occurred in the prompt or an earlier answer is drafted")
}
MAX_HOST_DRAFTS = 16  # maximum drafts of a source on the host, per row and step
MAX_RUN = 2 * MAX_HOST_DRAFTS + 1  # tokens a source offers: the window in flight, and the next
_SOURCES = ("mtp", *HOST_DRAFTS)
DRAFTS = (",".join(_SOURCES), *_SOURCES, "none")
DTYPE_NAMES = ("float32", "bfloat16", "float16")
REASONING_PARSERS = ("auto", "qwen3", "gpt_oss", "none")
JSON_SCHEMAS = ("closed", "standard")
UNKNOWN_PARAMETERS = ("warn", "error")
SPECIAL_TOKENS = ("control", "text")
TOOL_CALL_PARSERS = ("auto", "hermes", "qwen3_coder", "none")

DraftTokens = int | Literal["auto"]
"""Drafts per step: a fixed number, or "auto" to follow measured cost and acceptance."""

SEED = integer(-(1 << 63), (1 << 63) - 1)
_SECONDS = at_least(0.0)

C = TypeVar("C")


def setting(*flag: Any, program_default: Any = ..., **more: Any) -> Any:
    """Returns a dataclass field that has a `Flag` of these arguments in its metadata.

    `program_default` is the field's default if it differs from the flag's.
    """
    metadata = {"flag": Flag(*flag, **more)}
    default = metadata["flag"].default if program_default is ... else program_default
    return field(default=default, metadata=metadata)


def flags_of(settings: type) -> list[Flag]:
    """Returns the flags of a settings class."""
    return [f.metadata["flag"] for f in fields(settings) if "flag" in f.metadata]


def from_options(settings: type[C], options: argparse.Namespace, **given: Any) -> C:
    """Returns settings from a resolved command line, which may lack some flags, and `given`.

    A flag with the value None is resolved later: until then, the field has its default.
    """
    values = {
        each.name: value
        for each in fields(settings)  # type: ignore[arg-type]
        if (flag := each.metadata.get("flag"))
        and (value := getattr(options, flag.key, None)) is not None
    }
    return settings(**values | given)


def check_settings(settings: Any) -> None:
    """Raise UsageError for a value that its flag would not accept, unless it is the default."""
    for each in fields(settings):
        flag, value = each.metadata.get("flag"), getattr(settings, each.name)
        if flag is not None and value != each.default:
            try:
                flag.convert(str(value))
            except argparse.ArgumentTypeError as error:
                raise UsageError(f"{each.name}: {error}.") from None


def host_source_names(drafts: str) -> tuple[str, ...]:
    """Returns the draft sources on the host that a value of --drafts names."""
    return tuple(name for name in drafts.split(",") if name in HOST_DRAFTS)


def _bits(value: str) -> int | None:
    return None if word_of("none", "8", "4")(value) == "none" else int(value)


SEEING_BODY_BYTES = 64 << 20  # default of --max-body-size for a model that sees images


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How the engine batches and speculates."""

    num_draft_tokens: DraftTokens = setting(
        "multi-token prediction: --mtp-num-draft-tokens N|auto",
        f"tokens to draft per step, 0 to {MAX_DRAFT_TOKENS}; auto follows measured cost and "
        "acceptance",
        word_or("auto", integer(0, MAX_DRAFT_TOKENS)),
        default="auto",
    )
    max_num_seqs: int = setting(
        "limits: --max-num-seqs N", "most sequences computed at once", integer(1, 4096), default=32
    )
    max_model_len: int | None = setting(
        "model: --max-model-len N",
        "most tokens of prompt and answer together",
        integer(2, 1 << 31),
        default_text="the model's limit, or what memory allows if that is less",
    )
    prefill_step_size: int = setting(
        "memory and prefix cache: --prefill-step-size N",
        "most prompt tokens computed in one step",
        integer(1, 1 << 20),
        default_text="512; on a GPU 2048 or 1024 where memory allows",
        program_default=512,
    )
    vision: bool = setting(
        "model: --vision",
        "see images, if the model has a vision tower",
        default=True,
    )
    max_image_tokens: int = setting(
        "limits: --max-image-tokens N",
        "most tokens of an image; a larger image is scaled down",
        integer(1, 1 << 16),
        default=4096,
    )
    max_decode_pause: float = setting(
        "limits: --max-decode-pause MS",
        "most milliseconds that a step of running streams waits for a chunk of a prompt, as far as "
        "that leaves prompts half of their speed; 0: chunks have --prefill-step-size tokens",
        at_least(0.0),
        default=100.0,
        program_default=0.0,
    )
    # The default depends on the model and the backend (`LoadedModel.resolve_exact`).
    exact: bool = setting(
        "memory and prefix cache: --exact",
        "the same tokens, to the bit, whatever runs beside a request and is cached: prompts are "
        "computed one by one, in chunks of turns and of --prefill-step-size tokens, and only what "
        "was computed so is reused, so that answers are computed again as part of the next prompt",
        default_text="on CUDA, where kernels serve all weights, and on Metal, where the machine's "
        "own check finds nothing and it costs at most 5%, unless --max-decode-pause or "
        "--kv-cache-quantization is given",
        program_default=False,
    )
    overlap: bool = True  # launch step i+1 before the tokens of step i are read
    calibration_seconds: float = setting(
        "multi-token prediction: --calibration-seconds SECONDS",
        "most time to measure step costs while no request runs; 0 measures nothing then",
        _SECONDS,
        default=30.0,
        program_default=0.0,
    )
    drafts: str = setting(
        "multi-token prediction: --drafts",
        "where drafts come from: the model's MTP head if it has one, copies of what followed the "
        "same words in the prompt or an earlier answer, both, or nowhere; a fixed number of drafts "
        "is of the head's",
        DRAFTS,
        default=DRAFTS[0],
    )
    # In bytes. None, the flag's default, lets the memory plan decide, as for prefill_step_size.
    prefix_cache_size: int = setting(
        "memory and prefix cache: --prefix-cache-size SIZE",
        "memory for reusing earlier prompts and answers, such as 8GB; 0 turns that off",
        byte_size,
        default_text="a quarter of what the weights leave, at most 8GB",
        program_default=0,
    )
    draft_answers_size: int = setting(
        "memory and prefix cache: --draft-answers-size SIZE",
        "memory for the tokens of earlier answers, to copy drafts from; 0, or no prefix cache, "
        "keeps none",
        byte_size,
        default=8 << 20,
        default_text="8MiB",
    )
    # Applies to stored KV only: running sequences are never quantized.
    kv_cache_quantization: int | None = setting(
        "memory and prefix cache: --kv-cache-quantization {none,8,4}",
        "bits in which the prefix cache stores keys and values; with 8 or 4, answers that reuse "
        "them may differ slightly",
        _bits,
        default_text="none",
    )

    @property
    def decode_pause(self) -> float:
        """Maximum seconds of a prefill chunk while rows decode; 0 if unlimited or exact."""
        return 0.0 if self.exact else self.max_decode_pause / 1e3

    @property
    def host_sources(self) -> tuple[str, ...]:
        """Names of the draft sources on the host; empty if the number of drafts is fixed."""
        return host_source_names(self.drafts) if self.num_draft_tokens == "auto" else ()


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """How the HTTP server answers."""

    model_name: str  # the id that clients see and may ask for
    other_names: tuple[str, ...] = ()  # more ids of the same model
    model_bytes: int = 0  # size of the files with its weights
    any_model_name: bool = setting(
        "model: --any-model-name",
        "answer to any name of a model, for clients whose models can't be set",
        default=False,
    )
    host: str = setting(
        "server: --host ADDRESS",
        "address to listen on; 0.0.0.0 for other machines too",
        nonempty_text,
        default="127.0.0.1",
    )
    port: int = setting(
        "server: --port N", "port to listen on; 0 takes a free one", integer(0, 65535), default=8000
    )
    # From --api-key and --api-key-file. If there are any, all routes except /health and / need one.
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    # The number of API keys of the parent process that checks access, if this process has one.
    parent_keys: int | None = None
    allowed_hosts: tuple[str, ...] = setting(
        "security: --allowed-host NAME",
        "another name that clients may use for this server, such as host.docker.internal; * "
        "for any (repeatable)",
        host_name,
        default=(),
        repeated=True,
        default_text="localhost and IP addresses",
    )
    cors_origins: tuple[str, ...] = setting(
        "security: --cors-origin ORIGIN",
        "a web page that may call this server, such as https://chat.example; * for any "
        "(repeatable)",
        origin,
        default=(),
        repeated=True,
        default_text="the server's own",
    )
    optimistic: float = setting(
        "multi-token prediction: --mtp-optimistic X",
        "also accept a draft that has at least X times the probability of the token drawn, in "
        "requests that don't set it: faster, but answers are no longer those of plain decoding; "
        "0: off",
        at_least(0.0, 1.0),
        default=0.0,
    )
    seed: int | None = setting(
        "server: --seed N",
        "make the seeds of requests that have none repeatable",
        SEED,
        default_text="random",
    )
    page: bool = setting(
        "server: --page", "serve the page at /, with a chat and what the server does", default=True
    )
    vllm_metrics: bool = setting(
        "server: --vllm-metrics",
        "give /metrics the names of vLLM's too where they mean the same, for its dashboards",
        default=False,
    )
    log_prompts: bool = setting(
        "server: --log-prompts",
        "write the text of each prompt to the log, as the model gets it",
        default=False,
    )
    keep_alive_seconds: float = 10.0  # silence after which a stream gets an SSE comment
    max_choices: int = setting(
        "limits: --max-choices N", "largest n of a request", integer(1, 128), default=16
    )
    max_images: int = setting(
        "limits: --max-images N", "most images of a request", integer(0, 4096), default=64
    )
    max_body_bytes: int = setting(
        "limits: --max-body-size N",
        "longest request body, in bytes",
        integer(1, 1 << 30),
        default=8 << 20,
        default_text="8388608; 67108864 if the model sees images",
    )
    max_stored_completions: int = setting(
        "limits: --max-stored-completions N",
        "latest answers to keep in memory for each key: responses, and chat completions with "
        "store: true; 0 keeps none",
        integer(0, 1 << 20),
        default=100,
    )
    template_seconds: float = 10.0  # maximum time of the chat template per request
    # The template's text; the flag names a file, which `prepare_command` reads.
    chat_template: str | None = setting(
        "formats: --chat-template FILE",
        "file with a chat template (Jinja) in place of the model's own",
        nonempty_text,
        default_text="the model's",
    )
    chat_template_kwargs: Mapping[str, Any] | None = setting(
        "formats: --chat-template-kwargs JSON",
        "variables of the chat template for requests that don't set them, such as "
        """'{"preserve_thinking": true}'""",
        template_kwargs,
        default_text="none",
    )
    # Values of --temperature and the other flags that `options.SAMPLING_DEFAULTS` lists.
    sampling: Mapping[str, Any] = field(default_factory=dict)
    reasoning_parser: str = setting(
        "formats: --reasoning-parser",
        "how the model writes its reasoning; auto goes by the model's template",
        REASONING_PARSERS,
        default="auto",
    )
    tool_call_parser: str = setting(
        "formats: --tool-call-parser",
        "how the model writes tool calls; auto goes by the model's template",
        TOOL_CALL_PARSERS,
        default="auto",
    )
    json_schemas: str = setting(
        "formats: --json-schemas",
        "closed: an object that lists properties and doesn't speak of others takes no others; "
        "standard: as JSON Schema has it",
        JSON_SCHEMAS,
        default="closed",
    )
    unknown_parameters: str = setting(
        "server: --unknown-parameters",
        "what to do with a request's parameters that the server doesn't know: answer without them "
        "and name them in the response's header x-mlx-mtp-ignored, or refuse the request",
        UNKNOWN_PARAMETERS,
        default="warn",
    )
    request_chat_template: bool = setting(
        "security: --request-chat-template",
        "let requests bring a chat template of their own, a program that runs in a sandbox; only "
        "for clients that you trust",
        default=False,
    )
    special_tokens_in_messages: str = setting(
        "security: --special-tokens-in-messages",
        "what names of special tokens, such as <|im_end|>, become in the messages, names, "
        "arguments and tools of a chat: control: these tokens; text: text",
        SPECIAL_TOKENS,
        default="control",
    )
    share_prefixes: bool = setting(
        "security: --share-prefixes",
        "let the clients of different API keys reuse each other's prompts in the prefix cache; "
        "cached_tokens and the time to the first token tell them what others have asked",
        default=False,
    )
    # The model's directory if its template and tokenizer run in processes of their own.
    text_workers: Path | None = None
    max_queue: int = setting(
        "limits: --max-queue N",
        "most sequences that may wait for their turn; further requests get 429",
        integer(0, 1 << 20),
        default=256,
    )
    request_timeout: float = setting(
        "limits: --request-timeout SECONDS",
        "most seconds for a request, waiting included; 0: no limit",
        _SECONDS,
        default=0.0,
    )
    drain_timeout: float = setting(
        "server: --drain-timeout SECONDS",
        "seconds that running requests get to finish when the server is stopped",
        _SECONDS,
        default=30.0,
    )
    body_timeout: float = setting(
        "limits: --body-timeout SECONDS",
        "most seconds for receiving a request's body",
        at_least(0.1),
        default=60.0,
    )
    head_timeout: float = 20.0  # maximum seconds between an answer and the next request's head
    stall_timeout: float = 60.0  # seconds for a client to read from a full send buffer
    # Maximum bytes of the bodies and unread answers of all requests; stored answers take up to an
    # eighth more. `serve` sets the value from the memory plan.
    max_held_bytes: int = 512 << 20
    max_connections: int = 512

    @property
    def num_keys(self) -> int:
        """Number of API keys that tell clients apart."""
        return len(self.api_keys) if self.parent_keys is None else self.parent_keys


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """How several models share one address, each in a process of its own (`mlx_mtp.router`)."""

    models: tuple[str, ...] = setting(
        "model: models MODELS",
        "more models for the same address, each in a process of its own that starts when it is "
        "asked for; NAME=MODEL gives one a name",
        nonempty_text,
        default=(),
        repeated=True,
    )
    every: bool = setting(
        "model: --all",
        "serve every model of the Hugging Face cache that can be served, as if it were named",
        default=False,
    )
    keep_alive: float = setting(
        "model: --keep-alive TIME",
        "how long a model stays in memory when nobody asks for it, such as 10m, 0 or forever; one "
        "model alone then starts when it is asked for, too",
        duration,
        default_text="10m with several models; one model alone stays",
        program_default=600.0,
    )
    pinned: tuple[str, ...] = setting(
        "model: --pinned MODEL",
        "one of several models that starts at once and stays in memory (repeatable)",
        nonempty_text,
        default=(),
        repeated=True,
    )
    switch_after: float = setting(
        "limits: --switch-after SECONDS",
        "seconds that a request waits for room beside models that answer, before the one of them "
        "that was not asked for longest takes no more requests and makes room",
        _SECONDS,
        default=30.0,
    )
    model_timeout: float = setting(
        "limits: --model-timeout SECONDS",
        "most seconds that a request waits for its model, and that a model may take to load",
        at_least(1.0),
        default=600.0,
    )

"""Parameters that clients send for other servers: what is dropped, renamed, refused or noted."""

import re
from typing import Any

ANY = object()  # a neutral value: whatever it is, nothing of the answer changes
MAX_IGNORED = 16  # names that are reported of one request
MAX_NAME = 64
_NOT_SHOWN = re.compile(r"[^\w.\[\]-]", re.ASCII)

_HOST = "llama.cpp, Ollama: how their process uses the machine"
_CACHE = "a hint for another server's caches or scheduling"
_LABEL = "a label of the client's own"

# A parameter's name, the values that change nothing, and whose it is or why. An object's field has
# the names of the fields that it is in before its own.
NEUTRAL: dict[str, tuple[tuple[Any, ...], str]] = {
    "mirostat": ((0,), "llama.cpp, Ollama, Open WebUI"),
    "mirostat_tau": ((ANY,), "llama.cpp: of mirostat"),
    "mirostat_eta": ((ANY,), "llama.cpp: of mirostat"),
    "mirostat_ent": ((ANY,), "llama.cpp: of mirostat"),
    "mirostat_lr": ((ANY,), "llama.cpp: of mirostat"),
    "tfs_z": ((1,), "llama.cpp of old, Ollama"),
    "typical_p": ((1,), "llama.cpp, Ollama"),
    "typical": ((1,), "TGI"),
    "top_a": ((0,), "KoboldCpp, OpenRouter"),
    "top_n_sigma": ((-1, 0), "llama.cpp"),
    "epsilon_cutoff": ((0,), "text-generation-webui"),
    "eta_cutoff": ((0,), "text-generation-webui"),
    "xtc_probability": ((0,), "llama.cpp"),
    "xtc_threshold": ((ANY,), "llama.cpp: of xtc_probability"),
    "dry_multiplier": ((0,), "llama.cpp"),
    "dry_base": ((ANY,), "llama.cpp: of dry_multiplier"),
    "dry_allowed_length": ((ANY,), "llama.cpp: of dry_multiplier"),
    "dry_penalty_last_n": ((ANY,), "llama.cpp: of dry_multiplier"),
    "dry_sequence_breakers": ((ANY,), "llama.cpp: of dry_multiplier"),
    "dynatemp_range": ((0,), "llama.cpp"),
    "dynatemp_exponent": ((ANY,), "llama.cpp: of dynatemp_range"),
    "smoothing_factor": ((0,), "text-generation-webui"),
    "smoothing_curve": ((ANY,), "text-generation-webui: of smoothing_factor"),
    "repeat_last_n": ((-1,), "llama.cpp, Ollama: the whole context"),
    "penalize_nl": ((False,), "llama.cpp of old, Ollama"),
    "use_beam_search": ((False,), "vLLM"),
    "length_penalty": ((1,), "vLLM: of use_beam_search"),
    "early_stopping": ((False,), "vLLM: of use_beam_search"),
    "num_beams": ((1,), "transformers"),
    "do_sample": ((True,), "transformers, TGI"),
    "best_of": ((1,), "OpenAI, vLLM"),
    "max_tokens": ((-1,), "llama.cpp, LM Studio: no limit"),
    "max_completion_tokens": ((-1,), "the same"),
    "max_output_tokens": ((-1,), "the same"),
    "n_predict": ((-1,), "the same"),
    "num_predict": ((-1,), "the same, of Ollama"),
    "suffix": (("",), "OpenAI"),
    "verbosity": (("medium",), "OpenAI"),
    "text.verbosity": (("medium",), "OpenAI"),
    "stream_options.include_obfuscation": ((False,), "OpenAI"),
    "truncation": (("disabled",), "OpenAI"),
    "background": ((False,), "OpenAI"),
    "modalities": ((["text"], []), "OpenAI"),
    "functions": (([],), "OpenAI: of old"),
    "function_call": (("auto", "none"), "OpenAI: of functions"),
    "speed": (("standard",), "Anthropic"),
    "mcp_servers": (([],), "Anthropic"),
    "tools": (([],), "all: on routes that have none"),
    "documents": (([],), "vLLM"),
    "lora": (([],), "llama.cpp"),
    "grammar": (("",), "llama.cpp"),
    "logits_processors": (([],), "vLLM"),
    "detokenize": ((True,), "vLLM"),
    "spaces_between_special_tokens": ((ANY,), "vLLM: byte-level tokenizers add no spaces"),
    "add_special_tokens": ((ANY,), "vLLM: the tokenizers of these models add none"),
    "include_reasoning": ((True,), "vLLM, OpenRouter"),
    "separate_reasoning": ((True,), "SGLang"),
    "stream_reasoning": ((True,), "SGLang"),
    "reasoning_format": (("auto", "deepseek"), "llama.cpp"),
    "parse_tool_calls": ((True,), "llama.cpp"),
    "n_probs": ((0,), "llama.cpp"),
    "min_keep": ((0,), "llama.cpp"),
    "n_keep": ((ANY,), "llama.cpp: of a context that it shifts"),
    "n_discard": ((ANY,), "llama.cpp: of a context that it shifts"),
    "num_keep": ((ANY,), "Ollama: of a context that it shifts"),
    "timings_per_token": ((False,), "llama.cpp"),
    "raw": ((False,), "Ollama"),
    "return_hidden_states": ((False,), "SGLang"),
    "no_stop_trim": ((False,), "SGLang"),
    "return_tokens_as_token_ids": ((False,), "vLLM"),
    "num_ctx": ((ANY,), _HOST),
    "num_batch": ((ANY,), _HOST),
    "num_thread": ((ANY,), _HOST),
    "num_gpu": ((ANY,), _HOST),
    "main_gpu": ((ANY,), _HOST),
    "low_vram": ((ANY,), _HOST),
    "use_mmap": ((ANY,), _HOST),
    "use_mlock": ((ANY,), _HOST),
    "numa": ((ANY,), _HOST),
    "f16_kv": ((ANY,), _HOST),
    "logits_all": ((ANY,), _HOST),
    "vocab_only": ((ANY,), _HOST),
    "embedding_only": ((ANY,), _HOST),
    "keep_alive": ((ANY,), "Ollama: how long it keeps the model"),
    "ttl": ((ANY,), "LM Studio: how long it keeps the model"),
    "draft_model": ((ANY,), "LM Studio: drafts change no token"),
    "cache_prompt": ((ANY,), "llama.cpp: a cached prefix changes no token"),
    "id_slot": ((ANY,), "llama.cpp: where it keeps the prefix"),
    "slot_id": ((ANY,), "llama.cpp: where it keeps the prefix"),
    "prompt_cache_key": ((ANY,), _CACHE),
    "prompt_cache_retention": ((ANY,), _CACHE),
    "prompt_cache_options": ((ANY,), _CACHE),
    "prediction": ((ANY,), "OpenAI: drafts change no token"),
    "service_tier": ((ANY,), _CACHE),
    "priority": ((ANY,), "vLLM: " + _CACHE),
    "provider": ((ANY,), "OpenRouter: which server answers"),
    "route": ((ANY,), "OpenRouter: which server answers"),
    "transforms": (([],), "OpenRouter"),
    "plugins": (([],), "OpenRouter"),
    "usage": ((ANY,), "OpenRouter: answers always have it"),
    "extra_body": (({},), "the openai package: a slip of its users"),
    "guided_decoding_backend": ((ANY,), "vLLM: which library enforces a grammar"),
    "request_id": ((ANY,), _LABEL),
    "rid": ((ANY,), _LABEL),
    "id": ((ANY,), _LABEL),
    "chat_id": ((ANY,), _LABEL),
    "session_id": ((ANY,), _LABEL),
    "message_id": ((ANY,), _LABEL),
    "trace": ((ANY,), _LABEL),
    "inference_geo": ((ANY,), "Anthropic"),
    "anthropic_version": ((ANY,), "Anthropic, as Bedrock has it"),
    "anthropic_beta": ((ANY,), "Anthropic, as Bedrock has it"),
    "messages[].id": ((ANY,), _LABEL),
    "messages[].type": (("message",), "OpenAI's Responses"),
    "messages[].status": ((ANY,), _LABEL),
    "messages[].model": ((ANY,), _LABEL),
    "messages[].metadata": ((ANY,), _LABEL),
    "messages[].timestamp": ((ANY,), _LABEL),
    "messages[].created": ((ANY,), _LABEL),
    "messages[].created_at": ((ANY,), _LABEL),
    "messages[].createdAt": ((ANY,), _LABEL),
    "messages[].finish_reason": ((ANY,), _LABEL),
    "messages[].stop_reason": ((ANY,), _LABEL),
    "messages[].stop_sequence": ((ANY,), _LABEL),
    "messages[].usage": ((ANY,), _LABEL),
    "messages[].logprobs": ((ANY,), "of an earlier answer"),
    "messages[].reasoning_details": ((ANY,), "OpenRouter: `reasoning` again"),
    "messages[].prefix": ((False,), "DeepSeek"),
    "messages[].partial": ((False,), "Moonshot, Qwen"),
    "messages[].images": (([],), "Ollama"),
    "messages[].cache_control": ((ANY,), _CACHE),
    "messages[].tool_calls[].extra_content": ((ANY,), "Gemini"),
    "messages[].tool_calls[].cache_control": ((ANY,), _CACHE),
    "content[].cache_control": ((ANY,), _CACHE),
    "content[].id": ((ANY,), _LABEL),
    "content[].annotations": ((ANY,), "of an earlier answer"),
    "content[].logprobs": ((ANY,), "of an earlier answer"),
    "tools[].cache_control": ((ANY,), _CACHE),
    "tools[].function.cache_control": ((ANY,), _CACHE),
    "tools[].id": ((ANY,), _LABEL),
}

_FORM = "the form of the answer can't be enforced by this name here; chats take response_format"
_MEDIA = "this server takes and gives text only"
_ELSEWHERE = "it is not a parameter of this route, and would be missing in the prompt"
# Without these an answer would be wrong, not just different.
REFUSED: dict[str, str] = {
    "functions": "send `tools`",
    "function_call": "send `tool_choice`",
    "tools": "this route takes none",
    "messages[].function_call": "send `tool_calls`",
    "messages[].audio": _MEDIA,
    "messages[].images": _MEDIA,
    "audio": _MEDIA,
    "modalities": _MEDIA,
    "images": _MEDIA,
    "image_data": _MEDIA,
    "multi_modal_data": _MEDIA,
    "prompt_embeds": _MEDIA,
    "input_embeds": _MEDIA,
    "web_search_options": "this server runs no tools of its own",
    "mcp_servers": "this server runs no tools of its own",
    "container": "this server runs no tools of its own",
    "documents": "put them into the messages",
    "messages": _ELSEWHERE,
    "prompt": _ELSEWHERE,
    "input": _ELSEWHERE,
    "system": _ELSEWHERE,
    "instructions": _ELSEWHERE,
    "background": "an answer comes in the response to its request",
    "adapter_path": "this server has the model's own weights only",
    "adapters": "this server has the model's own weights only",
    "lora": "this server has the model's own weights only",
    **dict.fromkeys(
        (
            *("response_format", "structured_outputs", "structural_tag", "json_schema", "regex"),
            *("grammar", "ebnf", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
            *("structured_outputs.structural_tag", "output_config", "output_format", "format"),
        ),
        _FORM,
    ),
}

# One parameter's names; on each route the first that it has is meant.
_SAME = (
    ("repetition_penalty", "repeat_penalty"),
    (
        *("max_tokens", "max_completion_tokens", "max_output_tokens"),
        *("n_predict", "num_predict", "max_new_tokens"),
    ),
    ("stop", "stop_sequences"),
)
SYNONYMS = {name: names for names in _SAME for name in names}


def is_neutral(name: str, value: object) -> bool:
    """Whether a parameter with this value changes nothing."""
    return name in NEUTRAL and any(
        each is ANY or (each == value and isinstance(each, bool) == isinstance(value, bool))
        for each in NEUTRAL[name][0]
    )


def note(ignored: list[str], name: str) -> None:
    """Add a name that clients chose to those that are reported: bounded, and safe in a header."""
    name = _NOT_SHOWN.sub("?", name[: MAX_NAME + 1]) or "?"
    name = name if len(name) <= MAX_NAME else name[: MAX_NAME - 3] + "..."
    if name not in ignored and len(ignored) < MAX_IGNORED:
        ignored.append(name)

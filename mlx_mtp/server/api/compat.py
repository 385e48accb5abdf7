"""Parameters of other servers that clients send: dropped, renamed, refused or reported."""

from typing import Any

ANY = object()  # a wildcard among neutral values: no value of the parameter changes the answer
MAX_IGNORED = 16  # names of ignored parameters reported per request
MAX_NAME = 64  # characters of a reported name

# Values that change nothing, and the parameters for which they are neutral; a field within an
# object is named by its path.
_NEUTRAL_VALUES: tuple[tuple[tuple[Any, ...], str], ...] = (
    # Samplers of other servers, turned off, and parameters that have an effect only with them.
    ((0,), "mirostat top_a epsilon_cutoff eta_cutoff xtc_probability dry_multiplier"),
    ((0,), "dynatemp_range smoothing_factor n_probs min_keep"),
    ((1,), "tfs_z typical_p typical length_penalty num_beams best_of"),
    ((-1, 0), "top_n_sigma"),
    ((False,), "penalize_nl use_beam_search early_stopping"),
    ((True,), "do_sample"),
    ((ANY,), "mirostat_tau mirostat_eta mirostat_ent mirostat_lr xtc_threshold dry_base"),
    ((ANY,), "dry_allowed_length dry_penalty_last_n dry_sequence_breakers dynatemp_exponent"),
    ((ANY,), "smoothing_curve"),
    # The whole context, and no limit (llama.cpp, Ollama, LM Studio).
    ((-1,), "repeat_last_n thinking_budget_tokens thinking_token_budget"),
    ((-1, -2), "max_tokens max_completion_tokens max_output_tokens n_predict num_predict"),
    # Features that are turned off, or that every answer has.
    (([],), "functions mcp_servers tools documents lora logits_processors transforms plugins"),
    (([],), "messages[].images"),
    (({},), "extra_body"),
    (("",), "suffix grammar format"),
    (("medium",), "verbosity text.verbosity"),
    (("disabled",), "truncation"),
    (("standard",), "speed"),
    (("auto", "none"), "function_call"),
    (("auto", "deepseek"), "reasoning_format"),
    ((["text"], []), "modalities"),
    (("message",), "messages[].type"),
    ((True,), "detokenize include_reasoning separate_reasoning stream_reasoning parse_tool_calls"),
    ((False,), "stream_options.include_obfuscation background timings_per_token raw"),
    ((False,), "return_hidden_states no_stop_trim return_tokens_as_token_ids"),
    ((False,), "messages[].prefix messages[].partial"),
    ((ANY,), "usage"),
    # The tokenizers served here add neither spaces nor special tokens.
    ((ANY,), "spaces_between_special_tokens add_special_tokens"),
    # How another server's process uses its machine, keeps its context, or is chosen.
    ((ANY,), "num_ctx num_batch num_thread num_gpu main_gpu low_vram use_mmap use_mlock numa"),
    ((ANY,), "f16_kv logits_all vocab_only embedding_only n_keep n_discard num_keep keep_alive"),
    ((ANY,), "ttl provider route inference_geo anthropic_version anthropic_beta"),
    # Drafts, caches and libraries that change no token.
    ((ANY,), "draft_model prediction cache_prompt id_slot slot_id prompt_cache_key priority"),
    ((ANY,), "prompt_cache_retention prompt_cache_options service_tier guided_decoding_backend"),
    ((ANY,), "messages[].cache_control messages[].tool_calls[].cache_control"),
    ((ANY,), "content[].cache_control tools[].cache_control tools[].function.cache_control"),
    # Clients' labels, and parts of earlier answers that no prompt has.
    ((ANY,), "request_id rid id chat_id session_id message_id trace messages[].id"),
    ((ANY,), "messages[].status messages[].model messages[].metadata messages[].timestamp"),
    ((ANY,), "messages[].created messages[].created_at messages[].createdAt"),
    ((ANY,), "messages[].finish_reason messages[].stop_reason messages[].stop_sequence"),
    ((ANY,), "messages[].usage messages[].logprobs messages[].reasoning_details"),
    ((ANY,), "messages[].tool_calls[].extra_content content[].id content[].annotations"),
    ((ANY,), "content[].logprobs tools[].id"),
)
NEUTRAL = {name: values for values, names in _NEUTRAL_VALUES for name in names.split()}

_FORM = "the form of the answer can't be enforced by this name here; chats take response_format"
_MEDIA = "this server takes and gives text only"
_ELSEWHERE = "it is not a parameter of this route, and would be missing in the prompt"
# Dropping one of these parameters would make an answer wrong, not just different.
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

# Groups of synonyms: a route reads each of them as the first one that it knows.
_SAME = (
    ("repetition_penalty", "repeat_penalty"),
    (
        *("max_tokens", "max_completion_tokens", "max_output_tokens"),
        *("n_predict", "num_predict", "max_new_tokens"),
    ),
    ("stop", "stop_sequences"),
    ("thinking_budget", "thinking_budget_tokens", "thinking_token_budget"),
)
SYNONYMS = {name: names for names in _SAME for name in names}

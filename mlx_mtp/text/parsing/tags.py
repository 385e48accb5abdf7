"""The tags of Qwen's formats, and a pattern of closing tags that also accepts mangled ones."""

OPEN, CLOSE = "<think>", "</think>"
CALL, CALL_END = "<tool_call>", "</tool_call>"
FUNCTION, PARAMETER = "<function=", "<parameter="
MAX_NAME = 256
# </param>, </function=f>, </ tool_calls>, or </parameter without its ">" before a line's end.
CLOSER = (
    r"</ ?(?P<closes>param|func|tool_?call)\w{0,16}"
    rf"(?:=[^<>\n]{{0,{MAX_NAME}}})?[ \t]*(?:>|(?=[\n<]))"
)
EXACT_CLOSERS = ("</parameter>", "</function>", CALL_END)

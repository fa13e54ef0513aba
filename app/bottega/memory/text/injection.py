"""Detection of prompt injection in texts of external tools.

If the answer of an external tool looks like an instruction to the model, the run's episode is
stored, but later runs neither retrieve the episode nor learn from it. The detection is a second
line of defence, which finds only simple injections in some languages, and avoids false alarms.
"""

import re
import unicodedata
from collections.abc import Iterator

LONGEST_READ = 100_000
"""Maximum number of checked characters; half of them at each end of a longer text."""

# All expressions bound the number of repetitions, so matching is fast for any text.
_S = r"[\s,:;*_\"'-]{1,8}"
_WORDS = r"(?:[^\W\d_]{1,14}[\s,*_\"'-]{1,4}){0,4}?"
_BEFORE = r"(?:previous|prior|earlier|preceding|foregoing|above|your|system)"
_ANY = r"(?:all|any|other|original|initial|the)"
_USER = rf"{_S}the{_S}(?:user|human)\b"
_THIS = r"(?:this|these|it|that)"
_INVISIBLE = dict.fromkeys(
    [0xAD, 0x200B, 0x200C, 0x200D, 0x200E, 0x200F, 0x2060, 0xFEFF, *range(0x202A, 0x202F)]
)

_IGNORE = "it says to ignore instructions"
_PROMPT = "it asks for the system prompt"
_HIDE = "it says to hide something from the user"
_PART = "it plays a part in the conversation"
_ORDERS = "it gives a model instructions"

# Each item has a reason, the words with which a match begins, and an expression for the match.
_RULES: tuple[tuple[str, str, str], ...] = (
    (
        _IGNORE,
        "ignore, disregard, forget",
        (
            rf"\w{{6,9}}{_S}(?:{_WORDS}{_BEFORE}{_S}{_WORDS}(?:instruction|prompt|directive)s?\b"
            rf"|{_ANY}{_S}{_WORDS}instructions\b(?!{_S}(?:in|until|for|on|if)\b)"
            rf"|{_WORDS}(?:instructions|prompts){_S}(?:above|(?:that{_S})?you{_S}(?:were|have|got))\b"
            rf"|your{_S}(?:rules|guidelines|programming|training)\b"
            rf"|everything{_S}(?:above|before{_S}this)\b)"
        ),
    ),
    (
        _IGNORE,
        "override, bypass",
        rf"\w{{6,8}}{_S}{_WORDS}(?:previous|prior|your){_S}{_WORDS}instructions\b",
    ),
    (
        _IGNORE,
        "ignor, olvida, oubli, vergiss, vergessen, esqueça",
        (
            rf"\w{{5,10}}{_S}{_WORDS}(?:istruzioni|instrucciones|anweisungen|instruktionen|instruções"
            rf"|(?:instructions|consignes){_S}(?:précédentes|antérieures|ci))\b"
        ),
    ),
    (_IGNORE, "игнорируй, забудь", rf"\w{{7,13}}{_S}{_WORDS}(?:инструкции|указания)\b"),
    (_IGNORE, "忽略, 无视, 忘记", "..[^\n。]{0,8}(?:指令|指示|提示)"),
    (_IGNORE, "以前の, これまでの, 上記の, 前の", "[^\n。]{1,10}指示[^\n。]{0,4}無視"),
    (
        _PROMPT,
        "reveal, print, output, repeat, leak, disclose, send, tell, show",
        rf"\w{{4,8}}{_S}{_WORDS}your{_S}{_WORDS}(?:system{_S}(?:prompt|message)|instructions)\b",
    ),
    (_PROMPT, "new system prompt, updated system prompt", r"\w{3,7} system prompt\s{0,4}:"),
    (
        _HIDE,
        "do not, don't, don’t, never",  # noqa: RUF001 (as others write)
        (
            rf"(?:do{_S}not|don.t|never){_S}(?:(?:tell|inform|alert|warn){_USER}{_S}?"
            rf"(?:about{_S}{_THIS}\b|that{_S}you\b|anything\b|what{_S}you\b|[.!]|$)"
            rf"|(?:mention|reveal|disclose|show){_S}{_THIS}{_S}{_WORDS}(?:to|from){_USER})"
        ),
    ),
    (_HIDE, "without telling, without informing", rf"without{_S}\w{{7,9}}{_USER}"),
    (_HIDE, "non dir, non informare, non avvisare", rf"non {_WORDS}(?:all.|l.)utente\b"),
    (_PART, "<|", r"<\|(?:im_start|im_end|system|assistant|start_header_id|eot_id)\|>"),
    (_PART, "<<sys>>, [/inst]", ""),
    (
        _PART,
        "\nsystem, \nassistant, \ndeveloper, \n#, \n*",
        (
            r"\n[#*\s]{0,8}(?:system|assistant|developer)[*\s]{0,4}:[*\s]{0,8}"
            r"(?:you (?:are|must|will|should)|ignore|disregard|forget|from now on)\b"
        ),
    ),
    (
        _PART,
        "<system, <assistant, </system",
        r"</?(?:system|system_prompt|assistant)>\s{0,8}(?:you (?:are|must|will)|ignore|from now)\b",
    ),
    (
        _ORDERS,
        "here are, these are, follow, your new",
        (
            rf"(?:(?:here|these){_S}are|follow){_S}your{_S}new{_S}instructions\b"
            rf"|your{_S}new{_S}(?:instructions|task|goal|objective){_S}(?:is|are)\b"
        ),
    ),
    (_ORDERS, "you are now", r"you are now (?:dan\b|jailbroken|unrestricted|in developer mode)"),
    (
        _ORDERS,
        "instruction",
        (
            rf"instructions?{_S}(?:for|to){_S}{_WORDS}(?:ais?|llms?|model|assistant|agent)"
            rf"{_S}reading{_S}this\b"
        ),
    ),
)
_COMPILED = tuple((why, heads.split(", "), re.compile(whole)) for why, heads, whole in _RULES)


def suspicious(text: str) -> str | None:
    """Return the reason why an external text looks like an instruction; ``None``: it does not.

    The time is linear in the text's length; at most :data:`LONGEST_READ` characters are checked."""
    half = LONGEST_READ // 2
    sample = text if len(text) <= LONGEST_READ else f"{text[:half]}\n{text[-half:]}"
    if not sample.isascii():
        sample = unicodedata.normalize("NFKC", sample).translate(_INVISIBLE)[: 4 * LONGEST_READ]
    sample = f"\n{sample.lower()}"
    for why, heads, whole in _COMPILED:
        if any(whole.match(sample, at) for head in heads for at in _places(sample, head)):
            return why
    return None


def _places(text: str, head: str) -> Iterator[int]:
    """Yield the positions of ``head`` in ``text``, except in the middle of a word."""
    at = text.find(head)
    while at >= 0:
        if not (head[0].isalpha() and head[0].isascii() and text[at - 1].isalnum()):
            yield at
        at = text.find(head, at + len(head))

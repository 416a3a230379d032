"""Text from outside as it may be shown: without control characters, secrets and words of requests. Pure.

No character moves a cursor, hides, reorders or ends a line. Text is cleaned where it is shown, because inside the
program a name must stay unchanged: files are opened, arguments compared and labels matched by it. Each output has one
place that calls this: documents, pages, metrics, log lines, error lines. Every text that is quoted anywhere (API,
report, recording, page, metrics, state file) goes through `without_secrets` first, which finds secrets by their shape
as well as by name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from functools import lru_cache
from typing import Any, TypeVar, cast

T = TypeVar("T")


def clean(text: str) -> str:
    r"""Return the text on one line; characters that cannot be printed (C0, C1, bidi, line ends, surrogates) become
    `\x1b` or `\u202e`.

    Different names stay different, because they are labels of series.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def cleaned(value: T) -> T:
    """Return a value with all its texts clean: a JSON document, tuples of texts, or data classes of these."""
    made: Any = value
    if isinstance(value, str):
        made = clean(value)
    elif is_dataclass(value) and not isinstance(value, type):
        made = replace(value, **{one.name: cleaned(getattr(value, one.name)) for one in fields(value)})
    elif isinstance(value, Mapping):
        made = {cleaned(key): cleaned(item) for key, item in value.items()}
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        made = type(value)(*map(cleaned, value))
    elif isinstance(value, tuple | list):
        made = type(value)(map(cleaned, value))
    return cast("T", made)


def clean_for_page(value: Any) -> Any:
    """Return a value for a template: text clean, markup kept."""
    if not isinstance(value, str) or value.isprintable():
        return value
    # Markup is ours or escaped; its line ends lay out the page.
    return type(value)("\n".join(map(clean, value.split("\n")))) if hasattr(value, "__html__") else clean(value)


REDACTED = "<redacted>"
_DEPTH = 12

# Names of secrets, in arguments and in free text; `time_to_first_token` and `pad_token` are about tokens of a model.
_OF_MODELS = "".join(
    f"(?<!{word}.)" for word in ("first", "last", "next", "per", "new", "max", "cached", "eos", "bos", "pad", "mask")
)
_NAME = (
    r"(?:api[_-]?key|passw|passphrase|secret|credential|keyfile|(?:private|access|watermark)[_-]?(?:key|config)"
    r"|auth(?!or)|signature"
    r"|(?<![A-Za-z0-9])(?:sig(?![A-Za-z])|(?:hf|access|bearer|api|refresh|session)[_-]?token(?!iz))"
    rf"|{_OF_MODELS}(?<![A-Za-z0-9#])token(?![A-Za-z0-9_-]))"
)
_SECRET_NAME = re.compile(_NAME, re.IGNORECASE)
# Most specific first. Each has one group or none: what stays before the secret.
_SHAPES = tuple(
    re.compile(pattern, flags)
    for pattern, flags in (
        (r"()-----BEGIN [A-Z0-9 ]{3,40}-----.*?(?:-----END [A-Z0-9 ]{3,40}-----|\Z)", re.DOTALL),
        (r"()\beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}(?:\.[A-Za-z0-9_-]*)?", 0),  # a JWT
        (r"(\b[a-zA-Z][a-zA-Z0-9+.-]{1,20}://)[^\s/'\"@]{1,400}@", 0),  # a URL with credentials
        (
            (
                r"()\b(?:sk|pk|rk)-(?=[A-Za-z_-]*\d)[A-Za-z0-9_-]{8,}|\b(?:hf|gh[opusr]|glpat"
                r"|xox[abprs])[_-][A-Za-z0-9_-]{8,}"
            ),
            0,
        ),
        (r"()\b(?:npm|pypi|nvapi|gsk|r8)[_-](?=[A-Za-z_-]*\d)[A-Za-z0-9_-]{16,}", 0),
        (r"()\bgithub_pat_[A-Za-z0-9_]{20,}|\bAIza[A-Za-z0-9_-]{30,}|\bya29\.[A-Za-z0-9_-]{20,}", 0),
        (r"()\b(?:AKIA|ASIA|AGPA|AIDA|AROA|ANPA)[A-Z0-9]{12,}\b", 0),
        (
            (
                r"([?&;](?:X-Amz-(?:Signature|Credential|Security-Token)|X-Goog-(?:Signature|Credential)|sig|Signature"
                r"|AWSAccessKeyId|se|sp|sv)=)[^&\s'\"]+"
            ),
            re.IGNORECASE,
        ),
        (r"(\b(?:Bearer\s+(?=\S{6})|Basic\s+(?=\S{8})))[A-Za-z0-9+/._~=-]+", re.IGNORECASE),
        (r"(\bAuthorization['\"]?\s{0,3}[:=]\s{0,3}['\"]?)[^\s'\",]{4,}(?: [^\s'\",]{8,})?", re.IGNORECASE),
        (r"(" + _NAME + r"[\w-]{0,40}['\"]?\s{0,3}[:=]\s{0,3}b?['\"])[^'\"\n]{1,400}(?=['\"])", re.IGNORECASE),
        (r"(" + _NAME + r"[\w-]{0,40}\s{0,3}=\s{0,3})(?!None\b|True\b|False\b)[^\s'\",)}\]]{3,400}", re.IGNORECASE),
        (r"(--[a-z-]{0,40}?" + _NAME + r"[a-z-]{0,40}[ =])(?!-|None\b)[^\s'\"]{1,400}", re.IGNORECASE),
    )
)
# Of nearly all texts one look is enough.
_MAY_HOLD = re.compile(
    r"-----BEGIN|eyJ|://|[sprk]k-|[a-z0-9]{2,6}[_-][A-Za-z0-9_-]{8}|AI|A[KSGIRN][IPD]|ya29|[=:]|earer|asic"
    r"|uthorization|--",
    re.IGNORECASE,
)

_REQUEST_FIELDS = re.compile(
    r"((?<![\w])(?:input_ids|origin_input_ids|output_ids|token_ids|fill_ids|prompt_token_ids|prompt|prompts|text"
    r"|input_text|origin_input_text|"
    r"decoded_text|messages|content|image_data|audio_data|video_data|input_embeds|completion|query"
    r"|documents)['\"]?\s{0,2}[:=]\s{0,2})"
    r"(?:'(?:[^'\\\n]|\\.)*(?:'|$)|\"(?:[^\"\\\n]|\\.)*(?:\"|$)|\[[^\]\n]*(?:\]|$)|\{[^}\n]*(?:\}|$))"
)
_QUOTED = re.compile(r"(?<!\w)'[^'\n]*(?:'|$)|(?<!\w)\"[^\"\n]*(?:\"|$)")  # an apostrophe inside a word opens nothing
_LONG = 120  # characters of a quotation that may be a request's
_NUMBERS = re.compile(r"\[(?:\s*-?\d+\s*,){12,}[^\]\n]{0,100000}(?:\]|$)")
CUT = "…"


def without_secrets(text: str) -> str:
    """Return the text with every secret, known by its name or its shape, replaced by `<redacted>`."""
    if _MAY_HOLD.search(text) is None:
        return text
    for shape in _SHAPES:
        text = shape.sub(lambda match: (match[1] or "") + REDACTED, text)
    return text


@lru_cache(maxsize=2048)  # a server's arguments have the same names at every start
def is_secret(name: str) -> bool:
    """Return whether the value of a key is secret: of `api_key`, `ssl_keyfile` and `hf_token` it is, of
    `max_total_tokens` not.
    """
    return _SECRET_NAME.search(name) is not None


def holds_secret(text: str) -> bool:
    """Return whether a value may contain a secret: JSON with an `access_key`, a URL with a password, `--api-key` among
    arguments, or its name.
    """
    return _SECRET_NAME.search(text) is not None or without_secrets(text) != text


def redacted(value: Any, is_word: Callable[[str], bool] = lambda _: False, depth: int = 0) -> Any:
    """Return arguments without those that are secrets by their name; a value that may contain one becomes `<redacted>`.

    What stands inside a value is shown by an allow-list: figures, paths, addresses without a path, and known words.
    """
    if depth > _DEPTH:
        return REDACTED
    if isinstance(value, dict):
        kept = {str(key): inner for key, inner in value.items() if not is_secret(str(key))}
        return {key: _inside(inner, is_word, depth) for key, inner in kept.items()}
    if isinstance(value, list):
        # In a list such as ["--api-key", "…"] only the neighbour shows which item is the secret.
        words = " ".join(item for item in value if isinstance(item, str))
        return REDACTED if holds_secret(words) else [redacted(inner, is_word, depth + 1) for inner in value]
    is_hidden = isinstance(value, str) and (holds_secret(value) or not _is_plain(value, is_word))
    return REDACTED if is_hidden else value


def _inside(value: Any, is_word: Callable[[str], bool], depth: int) -> Any:
    """Return a value of a mapping: an argument's own, or one inside of it, of which only known words are shown."""
    if depth and isinstance(value, str):
        return value if _is_shown(value, is_word) else REDACTED
    if depth and isinstance(value, list):
        return [_inside(inner, is_word, depth + 1) for inner in value] if depth <= _DEPTH else REDACTED
    return redacted(value, is_word, depth + 1)


def _is_plain(text: str, is_word: Callable[[str], bool]) -> bool:
    """Whether a text has nothing inside of it, or only what may be shown: no pair, document or address with a path."""
    if text.lstrip()[:1] in {"{", "["}:
        try:
            document = json.loads(text)
        except (ValueError, RecursionError):
            return False
        return bool(_inside(document, is_word, 1) == document)
    if "://" in text:
        return _ADDRESS.fullmatch(text) is not None
    pairs = _PAIR.findall(text)
    return all(_is_shown(value, is_word) for value in pairs)


def _is_shown(text: str, is_word: Callable[[str], bool]) -> bool:
    return not text or is_word(text) or any(form.fullmatch(text) for form in (_NUMBER, _PATH, _ADDRESS))


# Values of pairs: `AccountKey=…;`, `x-team=…`, `Cookie: …`.
_PAIR = re.compile(r"[\w-](?:=|: +)([^;,&\s]*)")
_NUMBER = re.compile(r"[-+]?\d{1,12}(?:\.\d{1,12})?(?:e[-+]?\d{1,3})?[kKMGT]?i?B?|True|False|None|true|false|null")
_PATH = re.compile(r"(?:\.{1,2}|~)?(?:/[\w.-]{1,60}){1,20}/?")
# Without a path, which may be the secret of a hook; stores of models have one.
_ADDRESS = re.compile(
    r"[a-z][a-z0-9+.-]{1,15}://[\w.*\[\]:-]{1,200}/?|(?:s3|gs|hf|oci|az|file)://[\w./-]{1,400}",
    re.IGNORECASE | re.ASCII,
)


def without_requests(text: str) -> str:
    """Return the text without words of a request: values of a request's fields, long
    quotations and lists of token ids.
    """
    text = _REQUEST_FIELDS.sub(lambda match: match[1] + CUT, text)
    text = _QUOTED.sub(lambda match: match[0] if len(match[0]) <= _LONG else "'" + CUT + "'", text)
    return _NUMBERS.sub("[" + CUT + "]", text)

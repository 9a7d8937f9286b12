"""Passwords and tokens in URLs: used for reading, never stored and never shown.

- `hide` takes them out of what a recipe or a command line says, and what is left is all that the rest of vitrail sees
- they are kept in the environment, in VITRAIL_CREDENTIALS: URLs with theirs, separated by white space. So the processes
  that this one starts have them too, and a person can set them there, which a run that goes on needs
- `reveal` puts them back where a URL is opened: those of the longest URL there that it begins with
- `strip` is for text of any origin, such as errors of libraries, that is about to be shown or stored
"""

import os
import re
from collections.abc import Callable, Iterable
from typing import NamedTuple
from urllib.parse import unquote

VARIABLE = "VITRAIL_CREDENTIALS"
REMEDY = f"passwords and tokens are not stored: set {VARIABLE} to the URL with them"

# A scheme is short: a long word before the mark costs no time.
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]{0,30}://[^\s\"'<>`{}\[\]\\]+")  # in a text
_PARTS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://([^/?#]*)([^?#]*)(?:\?([^#]*))?(#.*)?", re.DOTALL)
_NAMED = ("http", "https", "ftp", "ftps")  # a name alone before the @ may be a token; elsewhere it is an address
# Names of parameters that open doors; with one of them, those that it was signed with go, too.
_SECRET = re.compile(
    r"x-(amz|goog|ms|oss|cos)-.*|.*(token|secret|passw|pwd|signature|credential|api[-_]?key|access[-_]?(key|id)|auth(?!or)|jwt"
    r"|session(?!s?$)).*|.+session|sig|sas|key-pair-id",
    re.IGNORECASE,
)
_PERHAPS = re.compile("key|session", re.IGNORECASE)  # a secret beside one of those, or if it looks like one
_SIGNED = re.compile(
    "s[vsprtei]|srt|spr|sip|sdd|sk(oid|tid|t|e|s|v)|expires|policy|algorithm|key|session", re.IGNORECASE
)
_SHORT = 5  # letters, below which a word is not looked for in a text: it may be anything


class _Opened(NamedTuple):
    """A URL taken apart: what is shown of it, and what is not."""

    scheme: str
    host: str  # with its port
    path: str
    query: str  # parameters that are no secret
    rest: str  # a fragment
    user: str  # name and password, as written
    secret: str  # parameters, as written, each with the mark before it
    whole: str = ""  # the path with the secrets in it, where there are some
    hidden: str = ""  # parameters of the fragment, each with the mark before it

    @property
    def shown(self) -> str:
        return self._replace(user="", secret="", whole="", hidden="").built

    @property
    def built(self) -> str:
        query, rest = self.query + self.secret, self.rest + self.hidden
        query, rest = ("" if not text else mark + text.lstrip("&;") for mark, text in (("?", query), ("#", rest)))
        return f"{self.scheme}://{self.user}{'@' * bool(self.user)}{self.host}{self.whole or self.path}{query}{rest}"

    @property
    def secrets(self) -> tuple[str, ...]:
        return self.user, self.secret, self.whole, self.hidden

    @property
    def words(self) -> list[str]:
        """Return the words that must not be seen anywhere."""
        parts = re.split("[&;/]", self.whole) + re.split("[&;]", self.secret + self.hidden)
        values = [part.partition("=")[2] for part in parts]
        values += [part.partition("=")[2] for part in self.secret.split("&")] + [self.user.partition(":")[2]]
        return [word for value in dict.fromkeys(values) for word in {value, unquote(value)} if len(word) >= _SHORT]


def _open(url: str) -> _Opened | None:
    found = _PARTS.fullmatch(url)
    if found is None:
        return None
    scheme, host, path, query, rest = (part or "" for part in found.groups())
    user, mark, host = host.rpartition("@")
    tail = url[len(scheme) + 3 + len(host) :]
    if not mark and ":" in host and not host.rpartition(":")[2].isdecimal() and "@" in tail:
        # A password with a slash or another mark in it, which should have been %2F.
        cut = len(path if "@" in path else tail)
        before, _, after = tail[:cut].rpartition("@")
        again = _PARTS.fullmatch(f"{scheme}://{after}{tail[cut:]}")
        if again is None:
            return None
        user = host + before
        scheme, host, path, query, rest = (part or "" for part in again.groups())
    elif mark and ":" not in user and scheme.lower() not in _NAMED:
        user, host = "", f"{user}@{host}"  # a container of a store, or the name of an account
    whole, (query, secret), (rest, hidden) = path, _divided(query), _divided(rest.removeprefix("#"), bare=False)
    path = "".join(part for part in re.split("(?=[;/])", path) if not (part.startswith(";") and _is_secret(part[1:])))
    return _Opened(scheme, host, path, query, rest, user, secret, whole * (whole != path), hidden)


def _divided(text: str, *, bare: bool = True) -> tuple[str, str]:
    """Split parameters into those that may be shown and those that may not; `bare`: names alone are some, too."""
    parts: list[str] = []
    for part in re.split("(?=&)", text):
        # What follows a secret behind a semicolon may be the rest of it.
        parts += [part] if _is_secret(part) else re.split("(?=;)", part)
    parts = [part for part in parts if part.strip("&;")]
    secret = [part for part in parts if _is_secret(part) and (bare or "=" in part)]
    if secret:
        secret = [part for part in parts if part in secret or _SIGNED.fullmatch(_name(part))]
    shown = "".join(part for part in parts if part not in secret)
    return shown.lstrip("&;"), "".join(part if part[0] in "&;" else f"&{part}" for part in secret)


def _name(part: str) -> str:
    return unquote(part.lstrip("&;").partition("=")[0])


def _is_secret(part: str) -> bool:
    """Tell whether a parameter opens a door: by its name, or where that may mean anything by its value."""
    name = _name(part)
    if _SECRET.fullmatch(name):
        return True
    return _PERHAPS.fullmatch(name) is not None and _is_random(unquote(part.partition("=")[2]))


def _is_random(value: str) -> bool:
    """Tell whether a word is long, and does not look as if a person had thought of it."""
    pieces = re.findall(r"[^\W_]+", value)
    switches = sum(len(re.findall(r"(?<=\d)(?=[^\W\d])|(?<=[^\W\d])(?=\d)", piece)) for piece in pieces)
    return len(value) >= 16 and (switches >= 4 or max(map(len, pieces), default=0) >= 24)


def hide(url: str) -> str:
    """Take the credentials out of a URL, or a chain of them, and keep them for `reveal`."""
    shown = []
    for part in url.split("::"):
        opened = _open(part)
        if opened is not None and any(opened.secrets):
            _keep(part)
        shown.append(part if opened is None else opened.shown)
    return "::".join(shown)


def clash(texts: Iterable[str]) -> str | None:
    """Say why texts are refused: two URLs in them differ in their credentials alone, and hidden they would be one."""
    given: dict[str, tuple[str, ...]] = {}
    for part in (part for text in texts for url in _URL.findall(text) for part in url.split("::")):
        opened = _open(part)
        if opened is None or not any(opened.secrets):
            continue
        if given.setdefault(opened.shown, opened.secrets) != opened.secrets:
            return f"{opened.shown}: two URLs differ in their passwords or tokens alone; give one of them"
    return None


def hide_in(text: str) -> str:
    """Hide the credentials of all URLs in a word of a command line."""
    key, mark, value = text.partition("=")
    if re.fullmatch(r"[\w.]*", key) and _PARTS.fullmatch(value):
        return f"{key}{mark}{hide(value)}"
    return hide(text) if _PARTS.fullmatch(text) else _URL.sub(lambda found: _in_text(found.group(), hide), text)


def reveal(url: str) -> str:
    """Put what is known of its credentials back into a URL, or a chain of them."""
    known = [opened for word in os.environ.get(VARIABLE, "").split() if (opened := _open(word)) is not None]
    return "::".join(_reveal(part, known) for part in url.split("::")) if known else url


def _reveal(url: str, known: list[_Opened]) -> str:
    opened = _open(url)
    if opened is None:
        return url
    place = (opened.scheme.lower(), opened.host.lower())
    fitting = [k for k in known if (k.scheme.lower(), k.host.lower()) == place and _begins(opened.path, k.path)]
    fitting.sort(key=lambda k: len(k.path))  # the longest comes last; of the same, the one that was given last
    user = opened.user or next((k.user for k in reversed(fitting) if k.user), "")
    secret = opened.secret or next((k.secret for k in reversed(fitting) if k.secret), "")
    here = [k for k in reversed(fitting) if k.path == opened.path]
    whole = opened.whole or next((k.whole for k in here if k.whole), "")
    hidden = opened.hidden or next((k.hidden for k in here if k.hidden), "")
    return opened._replace(user=user, secret=secret, whole=whole, hidden=hidden).built


def _begins(path: str, start: str) -> bool:
    return f"{unquote(path)}/".startswith(f"{unquote(start).rstrip('/')}/")


def strip(text: str) -> str:
    """Take the credentials of URLs out of a text, and any that are known."""
    if "://" in text:
        text = _URL.sub(lambda found: _in_text(found.group(), _shown), text)
    for word in os.environ.get(VARIABLE, "").split():
        opened = _open(word)
        for secret in opened.words if opened else ():
            text = text.replace(secret, "***")
    return text


def are_known() -> bool:
    """Tell whether this process has credentials that no file of its has."""
    return bool(os.environ.get(VARIABLE, "").strip())


def _shown(url: str) -> str:
    return "::".join(part if (opened := _open(part)) is None else opened.shown for part in url.split("::"))


def _in_text(found: str, change: Callable[[str], str]) -> str:
    """Change a URL that was found in a text, and leave the marks after it."""
    url = found.rstrip(".,;:)!")
    return change(url) + found[len(url) :]


def _keep(url: str) -> None:
    words = os.environ.get(VARIABLE, "").split()
    word = "%20".join(url.split())
    if word not in words[-1:]:
        os.environ[VARIABLE] = "\n".join([*(w for w in words if w != word), word])

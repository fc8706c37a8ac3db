"""What must not be published: secrets, and what names a person or their machine.

Looked for by form (a token, a key, a URL with a password, a home folder) and by value (this environment's own secrets,
this machine's name, this user's home).
"""

import os
import re
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path

# The form of each kind, and marks of which one is in every text that has the form: looking for those takes a hundredth
# of the time, in rows of many megabytes.
_SECRETS = {
    "a token of the hub": (r"\bhf_[A-Za-z0-9]{16,}", ("hf_",)),
    "an access key": (r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b", ("AKIA", "ASIA")),
    "a token of a code host": (
        r"\b(?:gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{16,})",
        ("ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_", "glpat-"),
    ),
    "an API key": (r"\bsk-[A-Za-z0-9_-]{20,}", ("sk-",)),
    "a URL with a password": (r"\b[a-z][a-z0-9+.-]*://[^\s/:@'\"]+:[^\s/@'\"]+@", ("://",)),
    "a private key": (r"-----BEGIN [A-Z ]*PRIVATE KEY", ("PRIVATE KEY",)),
}
_ANY_SECRET = re.compile("|".join(form for form, _ in _SECRETS.values()))
_MARKS = re.compile("|".join(mark for _, marks in _SECRETS.values() for mark in marks))
_OWNER_FORMS = {
    "an absolute path": r"(?:^|(?<=[\s\"'=:,(\[]))(?:~[\w-]*/[\w.-]+|/[\w.-]+/[\w./~-]+)",
    "an absolute path of Windows": r"\b[A-Za-z]:\\{1,2}\w+",
    "an e-mail address": r"\b[\w.+-]+@[\w-]+(?:\.[\w-]+)+\b",
}
_SECRET_NAMES = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY", re.IGNORECASE)
# Shorter values are words that may stand in a text by chance.
_SHORTEST = 8


def secrets_of(environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield name and value of each variable of an environment that holds a secret, going by its name or its form."""
    for name, value in environment.items():
        # A path is none.
        if len(value) >= _SHORTEST and value[0] != "/" and (_SECRET_NAMES.search(name) or _ANY_SECRET.search(value)):
            yield name, value


def secrets_in(text: str, environment: Mapping[str, str] | None = None) -> list[str]:
    """Say which secrets a text holds, without repeating them."""
    seen = set(_MARKS.findall(text))
    likely = [kind for kind, (_, marks) in _SECRETS.items() if seen.intersection(marks)]
    values = secrets_of(os.environ if environment is None else environment)
    named = [f"the value of {name}" for name, value in values if value in text]
    return [kind for kind in likely if re.search(_SECRETS[kind][0], text)] + named


def without_secrets(text: str) -> str:
    """Replace every secret in a text by a remark."""
    for _, value in secrets_of(os.environ):
        text = text.replace(value, "[secret removed]")
    return _ANY_SECRET.sub("[secret removed]", text)


def owner_in(text: str) -> list[str]:
    """Say what in a text names a person or their machine."""
    found = [f"{kind} ({match[0]})" for kind, form in _OWNER_FORMS.items() if (match := re.search(form, text))]
    host = socket.gethostname()
    if len(host) >= _SHORTEST and re.search(rf"\b{re.escape(host)}\b", text):
        found.append("this machine's name")
    home = str(Path.home())
    if home.count("/") > 1 and home in text:
        found.append("this user's home folder")
    return found

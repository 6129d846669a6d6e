"""Hosts, origins and tokens; and settings that would open a server to others."""

from typing import Any

import pytest

from vision.cli.composition import compose
from vision.config import ConfigError, parse
from vision.inference.serve.configs import ServeConfig
from vision.inference.serve.guard import RefusalError, check_headers

TOKEN = "0123456789abcdef"


def config(*words: str) -> ServeConfig:
    values, _ = compose("serve", ["checkpoint=somewhere", *words])
    return parse(ServeConfig, values)


def status(settings: ServeConfig, method: str = "POST", path: str = "/predict", **h: str) -> int:
    headers = [(k.replace("_", "-").encode(), v.encode()) for k, v in h.items()]
    scope: dict[str, Any] = {"headers": headers, "method": method, "path": path}
    try:
        check_headers(scope, settings)
    except RefusalError as refusal:
        return refusal.status
    return 200


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1:8000", 200),
        ("localhost:8000", 200),
        ("localhost", 200),
        ("[::1]:8000", 200),
        ("127.9.9.9", 200),
        ("rebound.example:8000", 421),
        ("127.0.0.1.rebound.example", 421),
        ("localhost@rebound.example", 421),
        ("localhost/../x", 421),
        ("localhost:99999", 421),
        ("[::1", 421),
        ("10.0.0.1", 421),
        ("", 421),
    ],
)
def test_only_names_of_this_machine_are_answered(host: str, expected: int) -> None:
    assert status(config(), host=host) == expected
    assert status(config(), method="GET", path="/", host=host) == expected


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"origin": "http://localhost:8000"}, 200),
        ({"origin": "http://localhost:8000", "sec_fetch_site": "same-origin"}, 200),
        ({"origin": "http://localhost:9000"}, 403),
        ({"origin": "http://127.0.0.1:8000"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "https://evil.example"}, 403),
        ({"sec_fetch_site": "cross-site"}, 403),
        ({"sec_fetch_site": "same-site"}, 403),
        ({"sec_fetch_site": "none"}, 200),
    ],
)
def test_posts_from_other_pages_are_refused(headers: dict[str, str], expected: int) -> None:
    assert status(config(), host="localhost:8000", **headers) == expected


def test_other_hosts_need_a_token_in_settings_and_requests() -> None:
    with pytest.raises(ConfigError, match=r"host=0\.0\.0\.0 .*token"):
        config("host=0.0.0.0")
    with pytest.raises(ConfigError, match="token"):
        config("token=short")
    open_to_others = config("host=0.0.0.0", f"token={TOKEN}")
    given = {"host": "server.example:8000", "authorization": f"Bearer {TOKEN}"}
    assert status(open_to_others, **given) == 200
    assert status(open_to_others, **(given | {"authorization": "Bearer wrong"})) == 401
    assert status(open_to_others, **(given | {"authorization": "Bearer ü"})) == 401
    assert status(open_to_others, host="server.example:8000") == 401
    assert status(open_to_others, method="GET", path="/model", host="server.example") == 401
    assert status(open_to_others, method="GET", path="/", host="server.example") == 200
    assert status(open_to_others, **given, origin="https://evil.example") == 403

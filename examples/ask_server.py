"""Ask `vision serve` with Python's own library: python examples/ask_server.py IMAGE [ADDRESS]

    vision serve checkpoint=outputs/latest

in another terminal; the address is http://127.0.0.1:8000 by default.
"""

import json
import sys
import urllib.request
from pathlib import Path


def ask(address: str, path: Path) -> dict[str, object]:
    """The answer to one image, sent as the field `file` of a form."""
    edge = b"the-edge-of-a-part"
    head = b'--%b\r\nContent-Disposition: form-data; name="file"; filename="image"\r\n\r\n' % edge
    body = head + path.read_bytes() + b"\r\n--%b--\r\n" % edge
    form = {"Content-Type": f"multipart/form-data; boundary={edge.decode()}"}
    request = urllib.request.Request(f"{address}/predict", body, form)
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)


if __name__ == "__main__":
    given = sys.argv[2] if len(sys.argv) > 2 else "http://127.0.0.1:8000"
    for best in ask(given, Path(sys.argv[1]))["top"]:
        print(f"{best['probability']:6.1%}  {best['label']}")

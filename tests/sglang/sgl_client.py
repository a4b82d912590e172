"""SGLang's own client against a server or gateway; module_runner.py runs it.

``main(URL, OUT.json, TOKENS)``: one program of SGLang's language generates as a whole and one as a
stream, each with TOKENS tokens. OUT gets the text, the streamed text and the meta_info of each.
"""

# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
# Runs under another Python, with packages that the development environment does not have.
from __future__ import annotations

import json
from pathlib import Path


def main(url: str, out: str, tokens: str) -> None:
    import sglang as sgl

    @sgl.function
    def tale(s, start):
        s += start
        s += sgl.gen(
            "rest",
            max_tokens=int(tokens),
            temperature=1.0,
            ignore_eos=True,
            return_logprob=True,
        )

    backend = sgl.RuntimeEndpoint(url)
    received = []
    for stream in (False, True):
        state = tale.run(start="Once upon a time", backend=backend, stream=stream)
        pieces = list(state.text_iter("rest")) if stream else []
        received.append(
            {
                "text": state["rest"],
                "streamed": "".join(pieces),
                "pieces": len(pieces),
                "meta_info": state.get_meta_info("rest"),
            }
        )
    Path(out).write_text(json.dumps(received))

"""Tests that SGLang's own parser takes the arguments of the servers in deploy."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.sglang.server import server_python
from tests.support.recipes import server_commands

PARSE = """
import argparse, json, sys
sys.path.insert(0, sys.argv[1])
import stand_ins
stand_ins.install()
from sglang.srt.server_args import ServerArgs
for arguments in json.loads(sys.argv[2]):
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    print("interval", parser.parse_args(arguments).stream_interval)
"""


@pytest.mark.long
def test_the_servers_of_the_recipes_can_be_started():
    commands = server_commands()
    done = subprocess.run(
        [server_python(), "-c", PARSE, str(Path(__file__).parent), json.dumps(commands)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n").count("interval 64") == len(commands) == 3

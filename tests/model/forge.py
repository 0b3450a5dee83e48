"""``python -m tests.model.forge``: runs Monarch's command line, again and again, without its start.

All modules are loaded once; each command then runs in a fork of this process, from the same entry
and with a daemon of its own, as ``monarch ARGUMENTS`` would. A command is a line of JSON,
``{"arguments": [...], "environment": {...}}``, and so is the reply,
``{"code": 0, "output": "..."}``.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile

from monarch.cli.main import VERBS, main


def _load() -> None:
    for verb in VERBS.values():
        importlib.import_module(verb.target.partition(":")[0])
    # What the verbs themselves load when they are called.
    for name in ("monarch.daemon.mount", "rich.console", "rich.progress", "prometheus_client"):
        importlib.import_module(name)


def run(arguments: list[str], environment: dict[str, str]) -> tuple[int, str]:
    """One command in a fork: its exit code and what it wrote."""
    with tempfile.TemporaryFile() as output:
        pid = os.fork()
        if pid == 0:
            code = 70
            try:
                os.environ.update(environment)
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                sys.argv = ["monarch", *arguments]
                code = main()
                sys.stderr.flush()
            finally:
                os._exit(code)
        _, status = os.waitpid(pid, 0)
        output.seek(0)
        return os.waitstatus_to_exitcode(status), output.read().decode(errors="replace")


if __name__ == "__main__":
    _load()
    for line in sys.stdin:
        request = json.loads(line)
        code, output = run(request["arguments"], request["environment"])
        print(json.dumps({"code": code, "output": output}), flush=True)

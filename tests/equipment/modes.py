"""The ways of reading, as options of a mount."""

from __future__ import annotations

MODES = {
    "python": "datapath=python",
    "relay": "datapath=relay,open=open",
    "passthrough": "datapath=passthrough,open=open",
    "no_open": "datapath=relay,open=none",
}

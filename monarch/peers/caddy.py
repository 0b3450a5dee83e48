"""The configuration of Caddy, which serves the copies where nginx cannot be installed.

It answers as nginx does with ``nginx.py``, with the same links and sockets. Caddy has no limit for
the requests of one address, and chooses a certificate by a name, which members do not send: so
there is no TLS.
"""

from __future__ import annotations

from monarch.peers.client import DIGEST_HEADER, TOKEN_HEADER
from monarch.peers.hello import CHALLENGE, HELLO
from monarch.peers.holding import FORM, WRITTEN
from monarch.peers.nginx import INTERNAL, SOCKET, Site
from monarch.tiers.contents import PARTS

_COPY = "[0-9a-f][0-9a-f]/[0-9]+"
_COMMON = f"""\
{{
  admin off
  auto_https off
  persist_config off
  storage file_system storage
  # An error of a request is logged with its headers, so with the token, and any client can cause
  # one.
  log {{
    level ERROR
    exclude http
  }}
  servers {{
    protocols h1
    max_header_size 4KB
    timeouts {{
      read_header 5s
      read_body 5s
      # A member gives up long before that.
      write 60s
      idle 75s
    }}
  }}
}}
(daemon) {{
  reverse_proxy unix/{SOCKET} {{
    @copy header X-Accel-Redirect {INTERNAL}/*
    handle_response @copy {{
      rewrite * {{rp.header.X-Accel-Redirect}}
      uri strip_prefix {INTERNAL}
      header {DIGEST_HEADER} {{rp.header.{DIGEST_HEADER}}}
      file_server
    }}
    @written header X-Accel-Redirect {WRITTEN}/*
    handle_response @written {{
      rewrite * {{rp.header.X-Accel-Redirect}}
      file_server
    }}
  }}
}}
"""


def configuration(site: Site, port: int) -> str:
    """What Caddy does at ``port``: ASCII text, a Caddyfile."""
    numbers = range(1, len(site.tiers) + 1)
    tries = " ".join(f"/{number}/{{re.copy.1}}" for number in numbers)
    # A large file has a whole copy or a partial one, with the same bytes at the same places.
    parts = " ".join(
        f"/{number}/{{re.part.1}} /{number}/{PARTS}/{{re.part.2}}" for number in numbers
    )
    name = site.key.set_name
    to_daemon = r"d/[0-9]+|r/[0-9]+/[0-9]+-[0-9]+"
    if site.written is not None:
        to_daemon += f"|{FORM}"
    return f"""\
{_COMMON}:{port} {{
  bind {site.address}
  root * .
  # Of a request with a body the daemon would get the body, too.
  @body {{
    header Content-Length *
    not header Content-Length 0
  }}
  handle @body {{
    respond 413
  }}
  @chunked header Transfer-Encoding *
  handle @chunked {{
    respond 413
  }}
  @hello path_regexp hello ^/{HELLO}/({CHALLENGE})$
  handle @hello {{
    # The address and the port at which the connection arrived.
    rewrite * /{HELLO}/{{re.hello.1}}/{{http.request.local.host}}/{{http.request.local.port}}
    import daemon
  }}
  @stranger not header {TOKEN_HEADER} {site.key.token()}
  handle @stranger {{
    respond 403
  }}
  @other not method GET
  handle @other {{
    respond 405
  }}
  @copy path_regexp copy ^/{name}/c/({_COPY})$
  handle @copy {{
    @here file {tries}
    handle @here {{
      rewrite * {{file_match.relative}}
      file_server
    }}
    handle {{
      import daemon
    }}
  }}
  @part path_regexp part ^/{name}/s/([0-9a-f][0-9a-f]/([0-9]+))/[0-9]+-[0-9]+$
  handle @part {{
    @there file {parts}
    handle @there {{
      rewrite * {{file_match.relative}}
      file_server
    }}
    handle {{
      import daemon
    }}
  }}
  @passed path_regexp ^/{name}/({to_daemon})$
  handle @passed {{
    import daemon
  }}
  handle {{
    respond 404
  }}
}}
"""

"""The configuration of nginx, which serves the copies of this node to the other members.

Its directory has links to all that it serves: the names below are relative to it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from monarch.peers.client import DIGEST_HEADER, TOKEN_HEADER
from monarch.peers.hello import CHALLENGE, HELLO, MemberKey
from monarch.peers.holding import FORM, WRITTEN
from monarch.peers.tls import Certificate
from monarch.tiers.contents import PARTS

SOCKET = "answers.sock"
# Where nginx finds a copy when the daemon has named its tier.
INTERNAL = "/copies"
# The links to the certificate of this node and its key.
CERTIFICATE, KEY = "tls.crt", "tls.key"
_LIMITS = """\
  # A client that is slow, or sends much, holds a connection for seconds, and kilobytes.
  client_header_timeout 5s;
  client_body_timeout 5s;
  send_timeout 10s;
  reset_timedout_connection on;
  lingering_close off;
  client_header_buffer_size 1k;
  large_client_header_buffers 2 1k;
  client_max_body_size 1;
  limit_conn_zone $binary_remote_addr zone=nodes:1m;
  limit_conn nodes 1024;
  # Any program may send these requests, so they must not fill the log.
  limit_conn_log_level info;
  limit_req_log_level info;
  # The daemon answers each hello, which takes some 0.2 ms: of one node, and of all together.
  limit_req_zone $binary_remote_addr zone=hello:1m rate=50r/s;
  limit_req_zone all zone=hellos:64k rate=1000r/s;
  limit_req_status 429;
"""
_PROXY = """\
    proxy_http_version 1.1;
    proxy_pass_request_headers off;
    proxy_pass_request_body off;
    proxy_set_header Connection "";
    proxy_set_header Host monarch;
    proxy_buffering off;
    proxy_max_temp_file_size 0;
    proxy_connect_timeout 1s;
    proxy_read_timeout 10s;
"""
_TLS = f"""\
    ssl_certificate {CERTIFICATE};
    ssl_certificate_key {KEY};
    ssl_protocols TLSv1.3;
    # A member keeps its connections, and a ticket would outlive the hello.
    ssl_session_tickets off;
"""
_HOLDING = f"""\
    location ~ "^/SET/({FORM})$" {{ try_files /none @daemon; }}
    location {WRITTEN}/ {{ internal; max_ranges 1; }}
"""


@dataclass(frozen=True, slots=True)
class Site:
    """What the engine serves: the directories with the copies in each tier, for the members that
    show the token of ``key``, the key of this node, at ``address`` and one of ``ports``; with
    ``certificate`` over TLS alone."""

    tiers: Sequence[Path]
    key: MemberKey
    address: str
    ports: Sequence[int]
    certificate: Certificate | None = None
    # The objects of written files that other members may be asked to keep.
    written: Path | None = None

    def shown(self, port: int) -> str:
        """Where it is served, for a person."""
        return f"{self.address} port {port}" + (", TLS" if self.certificate else "")


def configuration(site: Site, port: int) -> str:
    """What nginx does at ``port``: ASCII text."""
    address = f"[{site.address}]" if ":" in site.address else site.address
    user = "user root root;" if os.geteuid() == 0 else ""
    numbers = range(1, len(site.tiers) + 1)
    tries = " ".join(f"/{number}/$1" for number in numbers)
    # A large file has a whole copy or a partial one, with the same bytes at the same places.
    parts = " ".join(f"/{number}/$1 /{number}/{PARTS}/$2" for number in numbers)
    header = TOKEN_HEADER.lower().replace("-", "_")
    digest = DIGEST_HEADER.lower().replace("-", "_")
    set_name, token = site.key.set_name, site.key.token()
    listen, tls = f"listen {address}:{port};", ""
    if site.certificate is not None:
        listen = f"listen {address}:{port} ssl;"
        tls = _TLS
    written = "" if site.written is None else _HOLDING.replace("SET", set_name)
    temporary = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    return f"""\
daemon off;
master_process off;
pid nginx.pid;
{user}
error_log stderr warn;
events {{ worker_connections 4096; }}
http {{
  {" ".join(f"{name}_temp_path temporary;" for name in temporary)}
  access_log off;
  server_tokens off;
  etag off;
  default_type application/octet-stream;
  sendfile on;
  # With it, answers of this size take three times as long.
  tcp_nopush off;
  tcp_nodelay on;
  aio threads;
  keepalive_timeout 75s;
  keepalive_requests 1000000000;
{_LIMITS}  map_hash_bucket_size 128;
  map $uri $is_hello {{ default 0; "~^/{HELLO}/{CHALLENGE}$" 1; }}
  map $http_{header} $is_admitted {{ default $is_hello; "{token}" 1; }}
  upstream daemon {{ server unix:{SOCKET}; keepalive 32; }}
  server {{
    {listen}
{tls}    root .;
    max_ranges 0;
    if ($is_admitted = 0) {{ return 403; }}
    if ($request_method != GET) {{ return 405; }}
{_PROXY}    location ~ "^/{HELLO}/(?<challenge>{CHALLENGE})$" {{
      limit_req zone=hello burst=256 nodelay;
      limit_req zone=hellos burst=4096 nodelay;
      # The address and the port at which the connection arrived.
      proxy_pass http://daemon/{HELLO}/$challenge/$server_addr/$server_port;
    }}
    location ~ ^/{set_name}/c/([0-9a-f][0-9a-f]/[0-9]+)$ {{
      try_files {tries} @daemon;
    }}
    location ~ ^/{set_name}/s/([0-9a-f][0-9a-f]/([0-9]+))/[0-9]+-[0-9]+$ {{
      max_ranges 1;
      try_files {parts} @daemon;
    }}
    location ~ ^/{set_name}/(d/[0-9]+|r/[0-9]+/[0-9]+-[0-9]+)$ {{ try_files /none @daemon; }}
    location ~ ^{INTERNAL}/([0-9]+/([0-9a-f][0-9a-f]|{PARTS})/[0-9]+)$ {{
      internal;
      max_ranges 1;
      try_files /$1 =404;
      add_header {DIGEST_HEADER} $upstream_http_{digest};
    }}
{written}    location @daemon {{ proxy_pass http://daemon; }}
    location / {{ return 404; }}
  }}
}}
"""

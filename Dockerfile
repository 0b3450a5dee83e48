# Monarch in a container: the mount is made inside and seen on the host.
#
#   docker build -t monarch .
#   mkdir -p /mnt/monarch/imagenet && mount --bind /mnt/monarch /mnt/monarch && mount --make-shared /mnt/monarch
#   docker run -d --name monarch \
#       --device /dev/fuse --cap-add SYS_ADMIN --security-opt apparmor=unconfined \
#       -v /pfs/imagenet:/source:ro \
#       -v /local/nvme/monarch:/tier \
#       -v /mnt/monarch:/mnt/monarch:rshared \
#       -v monarch-state:/var/lib/monarch \
#       monarch mount --foreground --tier /tier:500GiB -o allow_other /source /mnt/monarch/imagenet
#
# --device /dev/fuse          the file system's door to the kernel; a container has none of its own
# --cap-add SYS_ADMIN         mount(2) asks for it, also inside of a container
# --security-opt apparmor=..  Docker's default profile forbids mount(2)
# :rshared                    carries the mount out to the host, and back in if it is there already
# --stop-timeout 60           give the daemon time to end the copies in flight
#
# Without :rshared only processes in this container see the mount. As another user than root add
# --user and leave out -o allow_other: then only this user sees it.

FROM python:3.11-slim-bookworm AS build
# pyfuse3 and the native datapath are compiled; the compiler stays behind in this stage.
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev libfuse3-dev pkg-config \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY monarch monarch
RUN pip wheel --no-cache-dir --wheel-dir /wheels .

FROM python:3.11-slim-bookworm
RUN apt-get update \
    && apt-get install -y --no-install-recommends fuse3 libfuse3-3 nginx-light \
    && rm -rf /var/lib/apt/lists/* \
    && echo user_allow_other >> /etc/fuse.conf
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    pip install --no-cache-dir --no-index --find-links=/wheels monarch-fs
# For `docker run --user monarch`. Mounting as root is the default: only root may serve other users
# of the host with the permissions of the source.
RUN useradd --system --uid 990 --create-home monarch \
    && install -d -m 0700 /var/lib/monarch
STOPSIGNAL SIGTERM
# Healthy: there is a mount, and each is served without trouble.
HEALTHCHECK --interval=30s --timeout=10s --start-period=60s CMD monarch status --json | python -c \
    "import json, sys; m = json.load(sys.stdin)['mounts']; sys.exit(not m or any(x['trouble'] for x in m))"
ENTRYPOINT ["monarch"]
CMD ["--help"]

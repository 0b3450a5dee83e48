"""Training jobs for tests of `monarch analyze`, each a process of its own."""

from __future__ import annotations

# Limits its own session, reads each file of a line, and reports what the daemon has counted.
LIMITED = """
import hashlib, json, sys
from monarch.frameworks.job_limits import JobLimits
mount, share, rate = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
limits = JobLimits(mount)
limits.limit(share, rate)
for line in sys.stdin:
    names = json.loads(line)
    digest = hashlib.sha256()
    for name in names:
        with open(f"{mount}/{name}", "rb") as file:
            digest.update(file.read())
    print(json.dumps([digest.hexdigest(), *limits.counts()]), flush=True)
"""

# Two threads fetch and prepare batches ahead of the training: arguments are the mount, the files of
# a batch, and the times of the preparation and of the training in seconds.
TRAINED = """
import os, queue, sys, threading, time
import monarch
mount, files, prep_s, training_s = sys.argv[1], int(sys.argv[2]), *map(float, sys.argv[3:5])
names = sorted(name for name in os.listdir(mount) if name.isdigit())

class Loader:
    num_workers, prefetch_factor = 1, 2

    def __len__(self):
        return 60

    def __iter__(self):
        ready = queue.Queue(2)
        threading.Thread(target=self.work, args=(ready,), daemon=True).start()
        for _ in range(len(self)):
            yield ready.get()

    def work(self, ready):
        for number in range(len(self)):
            of_batch = [names[(number * files + k) % len(names)] for k in range(files)]
            batch = [open(f"{mount}/{name}", "rb").read() for name in of_batch]
            time.sleep(prep_s)
            ready.put(batch)

for epoch in range(1000):
    for batch in monarch.watch(Loader()):
        assert len(batch) == files
        time.sleep(training_s)
"""

# Two threads prepare batches on as many cores: arguments are the mount, the files of a batch, the
# rounds of the hash that is the preparation, and a file for the cores of each run.
PREPARED = """
import hashlib, os, queue, sys, threading
import monarch
mount, files, rounds, log = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
names = sorted(name for name in os.listdir(mount) if name.isdigit())
with open(log, "a") as file:
    print(os.environ["MONARCH_PHASE"], len(os.sched_getaffinity(0)), file=file)

class Loader:
    num_workers, prefetch_factor = 2, 1

    def __len__(self):
        return 60

    def __iter__(self):
        ready, numbers = queue.Queue(2), iter(range(len(self)))
        for _ in range(2):
            threading.Thread(target=self.work, args=(numbers, ready), daemon=True).start()
        for _ in range(len(self)):
            yield ready.get()

    def work(self, numbers, ready):
        for number in numbers:
            of_batch = [names[(number * files + k) % len(names)] for k in range(files)]
            batch = b"".join(open(f"{mount}/{name}", "rb").read() for name in of_batch)
            ready.put(hashlib.pbkdf2_hmac("sha256", batch, b"salt", rounds))

for epoch in range(1000):
    for batch in monarch.watch(Loader()):
        assert len(batch) == 32
"""

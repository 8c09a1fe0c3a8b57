"""``measure.py SECONDS FOLDER COMMAND...``: runs a program, tells how it ended and what it took.

Owns time limit and accounting. It is a process of its own with nothing loaded, since Linux counts
what a parent had in memory at the fork for the child. Prints JSON; uses the standard library only.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time

# Characters of the program's messages that are kept, from their end.
MAX_MESSAGES = 4000


def main() -> None:
    """Runs the command in FOLDER and kills its whole process group after SECONDS."""
    limit, folder, command = float(sys.argv[1]), sys.argv[2], sys.argv[3:]
    log_path = os.path.join(folder, "messages.txt")
    with open(log_path, "wb") as log:
        start = time.perf_counter()
        child = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, cwd=folder, start_new_session=True
        )
        timed_out = threading.Event()

        def stop() -> None:
            timed_out.set()
            os.killpg(child.pid, signal.SIGKILL)

        timer = threading.Timer(limit, stop)
        timer.start()
        _, status, usage = os.wait4(child.pid, 0)
        timer.cancel()
        seconds = time.perf_counter() - start
    with open(log_path, encoding="utf-8", errors="replace") as log:
        messages = log.read()[-MAX_MESSAGES:]
    result = {
        "exit": os.WEXITSTATUS(status) if os.WIFEXITED(status) else None,
        "signal": os.WTERMSIG(status) if os.WIFSIGNALED(status) else None,
        "timed_out": timed_out.is_set(),
        "seconds": seconds,
        "peak_bytes": usage.ru_maxrss * 1024,
        "messages": messages,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()

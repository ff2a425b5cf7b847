"""Writes what it can where root may read, remove or run: INSIDE is the directory as it is seen here, OUTSIDE as
root sees it, MARKER what is made if root runs a program of this one's."""
import json
import os
import sys
import time

inside, outside, marker = sys.argv[1:4]
try:
    os.chdir(inside)
except PermissionError:
    print("nothing can be done: it can't even be entered", flush=True)
    sys.exit()
done = 0


def attempt(what, act):
    global done
    try:
        act()
        done += 1
        print(f"{what}: done", flush=True)
    except OSError as error:
        print(f"{what}: refused, {error.strerror}", flush=True)


def write(path, text, mode=0o666):
    with open(path, "w") as file:
        file.write(text)
    os.chmod(path, mode)


def program():
    write("program", f"#!/bin/sh\ntouch {marker}\n", 0o777)


def record():
    """A guest of root's that is to be removed by a program of ours, in the form that had a path to it."""
    users = {"base": 65536, "length": 65536}
    limits = {key: None for key in
              ("cpu_cores", "cpu_period_us", "cpu_weight", "memory_bytes", "processes", "cpus")}
    guest = {
        "id": "x", "dir": outside, "cgroup": "x", "root": "Host", "profile": "Host", "users": users,
        "uid": 0, "hostname": "x", "files": [], "binds": [], "commands": [], "env": {}, "sysctls": {},
        "limits": limits, "log_bytes_max": 1,
    }
    os.makedirs("x", exist_ok=True)
    write("record.json", json.dumps({
        "what": {"guest": guest}, "runc": f"{outside}/program", "runc_root": outside, "cgroup": "x",
        "fds": 0, "version": 2, "kind": "guest", "id": "x",
    }))


def rubbish():
    for name in ("a", "b", "c", "d"):
        os.makedirs(name, exist_ok=True)
    os.symlink("/dev/zero", "a/record.json")
    os.mkfifo("b/record.json")
    os.mkdir("c/record.json")
    write("d/record.json", "{" * 100)
    os.symlink("/etc", "e")
    os.symlink("/etc/shadow", "shim")
    os.symlink("/proc/self/mem", "pid")


def nested():
    for _ in range(100_000):
        os.mkdir("n")
        os.chdir("n")


def place():
    os.mkdir("place")
    os.rename("place", "memif.sock")


attempt("unlink", lambda: os.unlink("memif.sock"))
attempt("replace", lambda: (os.symlink("/etc/shadow", "link"), os.rename("link", "memif.sock")))
attempt("directory in its place", place)
attempt("program", program)
attempt("record", record)
attempt("rubbish", rubbish)
attempt("nested", nested)
os.chdir(inside)
if not done:
    print("nothing can be done", flush=True)
    sys.exit()
print("all done", flush=True)
while True:
    time.sleep(1000)

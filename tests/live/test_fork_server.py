"""Programs of a fork server are the owner's own processes: parent, session, title, environment, status, end."""

import json
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from tests.testbed.programs import ended

#: What an owner needs; each test adds what it does. A program of one module is written to the owner's folder.
OWNER = """
import json, os, signal, sys, time
from pathlib import Path
from millrace.supervision.fork_server import ForkServer, ForkServerLost

server = ForkServer.open(["json", "argparse"])
log = open("log", "ab")

def started(*arguments, module="program", **fields):
    return server.start(module, arguments, output=log.fileno(), **fields)

def status(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def tell(**said):
    print(json.dumps(said), flush=True)
"""

REPOSITORY = Path(__file__).parents[2]

#: Seconds that a process may take to end or to start here.
PATIENCE_S = 20.0


def owner(folder: Path, program: str, act: str, **popen: Any) -> subprocess.Popen[str]:
    """Starts an owner in a folder with a module ``program``."""
    (folder / "program.py").write_text(textwrap.dedent(program))
    script = folder / "owner.py"
    script.write_text(OWNER + textwrap.dedent(act))
    return subprocess.Popen([sys.executable, str(script)], cwd=folder, text=True, stdout=subprocess.PIPE, **popen)


def said_by(process: subprocess.Popen[str]) -> dict[str, Any]:
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    return json.loads(output)


def test_a_program_runs_as_python_would_run_it(tmp_path: Path) -> None:
    program = """
        import atexit, gc, json, os, signal, sys
        atexit.register(print, "at exit")
        print(json.dumps({
            "name": __name__, "arguments": sys.argv[1:], "pid": os.getpid(), "parent": os.getppid(),
            "session": os.getsid(0), "group": os.getpgid(0), "environment": dict(os.environ), "folder": os.getcwd(),
            "cores": sorted(os.sched_getaffinity(0)), "input": sys.stdin.read(),
            "title": open("/proc/self/cmdline").read().rstrip("\\0"),
            "default": signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, "collects": gc.isenabled(),
        }))
        print("error", file=sys.stderr)
        sys.exit(7)
    """
    act = """
        core = min(os.sched_getaffinity(0))
        pid = started("--word", "two words", environment={"ONLY": "this"}, cores=[core])
        tell(pid=pid, owner=os.getpid(), core=core, status=status(pid))
    """
    told = said_by(owner(tmp_path, program, act))
    error, said, *rest = (tmp_path / "log").read_text().splitlines()  # standard output is a file: it comes at the end
    assert (error, rest) == ("error", ["at exit"])
    pid = told["pid"]
    assert told["status"] == 7
    assert json.loads(said) == {
        "name": "__main__",
        "arguments": ["--word", "two words"],
        "pid": pid,
        "parent": told["owner"],
        "session": pid,
        "group": pid,
        "environment": {"ONLY": "this"},
        "folder": str(tmp_path),
        "cores": [told["core"]],
        "input": "",
        "title": f"{sys.executable} -m program --word two words",
        "default": True,
        "collects": True,
    }


def test_statuses_are_those_of_python(tmp_path: Path) -> None:
    program = """
        import sys
        match sys.argv[1]:
            case "text": sys.exit("a reason")
            case "error": raise RuntimeError("a bug")
            case "killed":
                import os; os.kill(os.getpid(), 9)
    """
    act = """
        tell(**{word: status(started(word)) for word in ("none", "text", "error", "killed")}, missing=status(
            started(module="no_such_module")))
    """
    assert said_by(owner(tmp_path, program, act)) == {"none": 0, "text": 1, "error": 1, "killed": -9, "missing": 1}
    log = (tmp_path / "log").read_text()
    assert "a reason" in log
    assert "RuntimeError: a bug" in log
    assert "no_such_module" in log


def test_fork_server_and_programs_end_with_their_owner(tmp_path: Path) -> None:
    act = """
        tell(pid=started(), server=server.pid)
        time.sleep(60)
    """
    process = owner(tmp_path, "import time; time.sleep(60)", act)
    told = json.loads(process.stdout.readline())
    assert not any(ended(pid) for pid in told.values())
    process.kill()
    process.communicate()
    until_s = time.monotonic() + PATIENCE_S
    while not all(ended(pid) for pid in told.values()):
        assert time.monotonic() < until_s, told
        time.sleep(0.01)


def test_a_module_that_is_imported_already_runs_anew_and_without_a_warning(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "package" / "__main__.py").write_text("print(__name__)")
    act = """
        server = ForkServer.open(["program", "package.__main__"])
        tell(program=status(started()), package=status(started(module="package")))
    """
    process = owner(tmp_path, "print(__name__)", act, stderr=subprocess.PIPE)
    output, complaint = process.communicate(timeout=60)
    assert json.loads(output.splitlines()[-1]) == {"program": 0, "package": 0}, complaint
    assert (tmp_path / "log").read_text() == "__main__\n__main__\n"


def test_what_imports_print_is_in_a_log_and_not_in_the_owners_terminal(tmp_path: Path) -> None:
    (tmp_path / "talks.py").write_text("import sys\nprint('printed')\nprint('warned', file=sys.stderr)\n")
    act = """
        from pathlib import Path
        server = ForkServer.open(["talks"], Path("logs/imports.log"))
        tell(status=status(started()))
    """
    process = owner(tmp_path, "print('from the program')", act, stderr=subprocess.PIPE)
    output, complaint = process.communicate(timeout=60)
    assert (json.loads(output), complaint) == ({"status": 0}, "")
    assert sorted((tmp_path / "logs" / "imports.log").read_text().splitlines()) == ["printed", "warned"]
    assert (tmp_path / "log").read_text() == "from the program\n"


@pytest.mark.parametrize(
    ("module", "reason"), [("no_such_module", "no_such_module"), ("threaded", "2 threads after the imports")]
)
def test_imports_that_fail_or_leave_a_thread_end_the_fork_server(tmp_path: Path, module: str, reason: str) -> None:
    (tmp_path / "threaded.py").write_text("import threading\nthreading.Thread(target=threading.Event().wait).start()\n")
    act = f"""
        broken = ForkServer.open(["{module}"])
        try:
            broken.start("program", [], output=1)
        except ForkServerLost:
            broken.close()
            tell(lost=True)
    """
    process = owner(tmp_path, "", act, stderr=subprocess.PIPE)
    output, complaint = process.communicate(timeout=60)
    assert json.loads(output) == {"lost": True}
    assert reason in complaint


def test_children_start_by_themselves_where_the_imports_take_too_long(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(60)\n")
    act = """
        import asyncio
        from millrace.supervision import fork_server
        from services.supervisor.config import ChildSpec, Imports
        from services.supervisor.effects import ChildExited, StartChild
        from services.supervisor.launcher import Launcher
        fork_server.ANSWER_LIMIT_S = 0.1
        slow = ForkServer.open(["slow"])

        async def run():
            told = asyncio.Queue()
            launcher = Launcher(Path("logs"), told.put_nowait, {Imports.VLLM: slow})
            command = [sys.executable, "-m", "program"]
            for name in ("one", "two"):
                spec = ChildSpec(name=name, role="worker", command=command, imports=Imports.VLLM)
                launcher.start(StartChild(spec=spec))
            told = [await told.get() for _ in range(4)]
            tell(statuses=[event.status for event in told if isinstance(event, ChildExited)])

        asyncio.run(run())
    """
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    process = owner(tmp_path, "import sys; sys.exit(7)", act, stderr=subprocess.PIPE, env=environment)
    output, complaint = process.communicate(timeout=60)
    assert json.loads(output) == {"statuses": [7, 7]}, complaint
    assert complaint.count("engines start slower from here on") == 1


def test_no_fork_server_is_made_where_threads_run(tmp_path: Path) -> None:
    act = """
        import threading
        over = threading.Event()
        threading.Thread(target=over.wait).start()
        tell(server=ForkServer.open([]))
        over.set()
    """
    assert said_by(owner(tmp_path, "", act)) == {"server": None}

"""The one line that says why a process did not start."""

import pytest

from services.supervisor.causes import failure_cause

CORE = "(EngineCore pid=7) ERROR 11-24 17:54:40 [core.py:1120] "
POINTER = "worker: RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}"
INSPECTED = """\
{main}Error in inspecting model architecture 'Qwen3_5ForConditionalGeneration'
{main}Traceback (most recent call last):
{main}  File "registry.py", line 1569, in _run_in_subprocess
{main}    returned.check_returncode()
{main}subprocess.CalledProcessError: Command '[...]' returned non-zero exit status 1.
{main}
{main}The above exception was the direct cause of the following exception:
{main}
{main}Traceback (most recent call last):
{main}  File "registry.py", line 1572, in _run_in_subprocess
{main}    raise RuntimeError(
{main}RuntimeError: Error raised in subprocess:
{main}Triton is installed, but doesn't include CPU backend. Disabling Triton.
{main}Traceback (most recent call last):
{main}  File "image_processing_qwen2_vl.py", line 26, in <module>
{main}    from torchvision.transforms.v2 import functional as tvF
{main}ModuleNotFoundError: No module named 'torchvision'
{main}
worker: ValidationError: Model architectures ['Q'] failed to be inspected. Please check the logs for more details.
""".format(main="(MainProcess pid=9) ERROR 11-24 17:54:40 [registry.py:1120] ")


def traceback(raised: str, *, code: str = "main()") -> str:
    lines = [
        "Traceback (most recent call last):",
        '  File "core.py", line 1, in run',
        f"    {code}",
        "    ^^^^^^",
        raised,
    ]
    return "".join(f"{CORE}{line}\n" for line in lines)


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        pytest.param("", "", id="no log"),
        pytest.param("loading\nready\n", "", id="no exception"),
        pytest.param(INSPECTED, "ModuleNotFoundError: No module named 'torchvision'", id="logged by a subprocess"),
        pytest.param(traceback("ValueError: no room") + POINTER, "ValueError: no room", id="the engine's process"),
        pytest.param(
            traceback("AssertionError", code="assert not caching") + POINTER,
            "AssertionError: `assert not caching`",
            id="an assertion without words",
        ),
        pytest.param(traceback("a.b.OutOfMemory: 2 GiB"), "OutOfMemory: 2 GiB", id="a traceback alone"),
        pytest.param(
            traceback("OSError: tried and caught") + "worker: ValueError: BertModel pools",
            "ValueError: BertModel pools",
            id="the worker's own words",
        ),
        pytest.param(POINTER, POINTER.partition(": ")[2], id="a pointer to nothing"),
    ],
)
def test_a_failed_start_is_told_by_its_own_last_exception(log: str, cause: str) -> None:
    assert failure_cause(log.splitlines()) == cause

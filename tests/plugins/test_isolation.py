"""User modules that do anything at all when they are imported: one sentence, in bounded time, by real processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from dagrl.plugins.custom import name_of
from dagrl.plugins.isolation import ask, isolated_imports
from dagrl.validation import check_file

GOOD = "def f(response):\n    return 1.0\n"
REWARD = ("fn: exact}", "fn: m:f} #!")

ENDS = [
    ("os._exit(0)", "ends the process with exit code 0, as os._exit does"),
    ("os._exit(7)", "ends the process with exit code 7"),
    ("os.abort()", "crashes the process (SIGABRT) at {m}:2"),
    ("import ctypes; ctypes.string_at(0)", "crashes the process (SIGSEGV) at {m}:2"),
    ("os.kill(os.getpid(), 9)", "gets the process killed (SIGKILL), as happens where memory runs out"),
    ("os.killpg(0, 15)", "crashes the process (SIGTERM)"),
    ("os.killpg(os.getpgid(0), 9)", "gets the process killed (SIGKILL)"),
    ("import signal; signal.raise_signal(signal.SIGINT)", "(SIGINT)"),
    ("import faulthandler; faulthandler._sigsegv()", "crashes the process (SIGSEGV) at {m}:2"),
    ("os.execv('/bin/true', ['true'])", "ends the process with exit code 0"),
    ("import signal; signal.setitimer(signal.ITIMER_REAL, 0.05); time.sleep(9)", "crashes the process (SIGALRM)"),
    ("os.closerange(3, 65536)", "closes file descriptors that it has not opened"),
    ("import threading; threading.Thread(target=os._exit, args=(3,)).start(); time.sleep(9)", "exit code 3"),
    # A process that it leaves behind holds the pipe open.
    ("if os.fork(): os._exit(5)\ntime.sleep(60)", "ends the process with exit code 5"),
]
HANGS = [
    ("time.sleep(1e9)", "takes more than 3 s at {m}:2; do such work when the function is called"),
    ("while True: pass", "takes more than 3 s at {m}:2"),
    ("import threading; threading.Event().wait()", "takes more than 3 s at {m}:2"),
    ("import threading; lock = threading.Lock(); lock.acquire(); lock.acquire()", "takes more than 3 s at {m}:2"),
    ("import signal; signal.signal(signal.SIGABRT, signal.SIG_IGN); time.sleep(99)", "takes more than 3 s;"),
    ("os.kill(os.getpid(), 19)", "takes more than 3 s"),
    ("sum(range(10**12))", "takes more than 3 s at {m}:2"),
    ("import re; re.match('(a+)+$', 'a' * 60 + 'b')", "takes more than 3 s at {m}:2"),
    ("r, w = os.pipe(); os.read(r, 1)", "takes more than 3 s at {m}:2"),
    ("os.closerange(3, 65536); time.sleep(99)", "takes more than 3 s"),
]
RAISES = [
    ("raise BaseException('out')", "fails at {m}:2: BaseException: out; fix the module"),
    ("raise KeyboardInterrupt", "fails at {m}:2: KeyboardInterrupt; fix the module"),
    ("raise GeneratorExit('g')", "fails at {m}:2: GeneratorExit: g; fix"),
    ("raise SystemExit", "fails at {m}:2: SystemExit; fix"),
    ("sys.exit(0)", "fails at {m}:2: SystemExit: 0; fix"),
    ("quit()", "fails at {m}:2: "),
    ("import asyncio; raise asyncio.CancelledError()", "fails at {m}:2: CancelledError; fix"),
    ("raise ExceptionGroup('several', [ValueError(1)])", "fails at {m}:2: ExceptionGroup: several (1 sub-exception);"),
    (
        "class E(Exception):\n    def __str__(self): raise OSError\nraise E",
        "fails at {m}:4: E: it has no message; fix",
    ),
    ("raise ValueError('x' * 10**6)", "xxx ...; fix the module"),
    ("raise ValueError('two\\nlines')", "ValueError: two lines; fix"),
    ("def again(): again()\nagain()", "fails at {m}:2: RecursionError: maximum recursion depth"),
    (
        "a = []\nwhile True: a.append(bytearray(10**8))",
        "fails at {m}:3: MemoryError; load less when the module is imported",
    ),
    ("input('what? ')", "fails at {m}:2: EOFError: EOF when reading a line"),
    ("assert False, 'never'", "fails at {m}:2: AssertionError: never"),
    ("import absent_package.part", "No module named 'absent_package'; install absent_package, or fix the import"),
    ("from . import other", "fails at {m}:2: ImportError: attempted relative import with no known parent package"),
    ("import m2", "fails at {folder}/m2.py:1: ImportError: cannot import name 'f' from partially initialized module"),
    ("from pathlib import Path; Path('gone.txt').read_text()", "fails at {m}:2: FileNotFoundError"),
    ("sys.modules[__name__] = None", "module 'm'"),
    ("def __getattr__(name): raise RuntimeError('lazy ' + name)", "fails at {m}:2: RuntimeError: lazy f; fix"),
    ("from enum import Enum\nE = Enum('E', 'a a')", "fails at {m}:3: TypeError"),
    ("import warnings; warnings.simplefilter('error'); warnings.warn('old')", "fails at {m}:2: UserWarning: old"),
    ("def f(:", "fails at {m}:2: SyntaxError: "),
    ("f = (((" + "(" * 300, "fails at {m}:2: SyntaxError: "),
    ("\tdef f(): ...", "fails at {m}:2: IndentationError: unexpected indent; fix"),
    ("x = '\0'", "SyntaxError: source code string cannot contain null bytes; fix"),
]
WRONG_FUNCTIONS = [
    ("f = 3", "module 'm' has no function 'f', but a value of type int; name a function"),
    ("f = None", "has no function 'f', but a value of type NoneType; name a function"),
    ("def g(response): return 1.0", "module 'm' has no function 'f'"),
    ("", "module 'm' has no function 'f'; there are no names to choose from"),
    ("class f: ...", "`m:f` is a class, and a reward is a function; name one"),
    ("async def f(response): return 1.0", "`m:f` is async, and is called without await; write it with `def`"),
    ("async def f(response): yield 1.0", "`m:f` is async"),
    ("def f(response): yield 1.0", "`m:f` yields, and must return its result; write it with `return`"),
    ("import functools\nasync def g(x, response): ...\nf = functools.partial(g, 1)", "`m:f` is async"),
    ("import operator\nf = operator.itemgetter(1)", "does not say its parameters"),
    ("f = dict.fromkeys", "by position"),
    ("f = type('T', (), {'__call__': 3})()", "does not say its parameters"),
    ("def f(response, /): return 1.0", "takes 'response' by position, and arguments are given by name"),
    ("def f(response, level): return 1.0", "wants 'level', which is none of prompt, response"),
    ("f = lambda x: 1.0", "wants 'x'"),
    ("import dagrl\nf = dagrl.reward(concurrency=0)(print)", "fails at {m}:3: ValueError: a reward's concurrency"),
]


@pytest.fixture
def module(project):
    """Write ``m.py``, whose second line is the source's first; the pipeline's reward is its function `f`."""

    def write(source: str) -> Path:
        project.write("m2.py", "from m import f\n")
        project.write("m.py", f"import os, sys, time\n{source}\n")
        return project.pipeline(REWARD)

    return write


def assert_told(project, path, wanted, *, seconds=20.0):
    begun = time.monotonic()
    with isolated_imports(seconds=seconds, memory=1 << 30):
        project.assert_problem(
            path, "nodes.reward.fn", wanted.format(m=project.folder.resolve() / "m.py", folder=project.folder.resolve())
        )
    assert time.monotonic() - begun < 60


@pytest.mark.parametrize(("source", "wanted"), [*ENDS, *RAISES, *WRONG_FUNCTIONS])
def test_a_failing_import_is_one_sentence(project, module, source, wanted):
    assert_told(project, module(f"{source}\n{GOOD}" if (source, wanted) in ENDS else source), wanted)


@pytest.mark.parametrize(("source", "wanted"), HANGS)
def test_a_module_that_does_not_come_back_is_one_sentence(project, module, source, wanted):
    assert_told(project, module(f"{source}\n{GOOD}"), wanted, seconds=3.0)


@pytest.mark.parametrize(
    "source",
    [
        "print('x' * 10**6); sys.stdout.write('y'); sys.stderr.write('z'); os.write(1, b'raw'); os.write(2, b'raw')",
        "sys.stdout = sys.stderr = None",
        "os.close(1); os.close(2); os.close(0)",
        "os.chdir('/')",
        "sys.path.clear()",
        "sys.path = ['/']",
        "import signal; [signal.signal(each, signal.SIG_IGN) for each in (2, 15, 6)]",
        "import atexit; atexit.register(os._exit, 9); atexit.register(time.sleep, 99)",
        "import threading; threading.Thread(target=time.sleep, args=(99,)).start()",
        "import subprocess; subprocess.Popen(['sleep', '99'])",
        "if not os.fork(): time.sleep(99)",
        "assert sys.stdin.read() == ''",
        "sys.argv.clear(); os.environ.clear()",
        "sys.setrecursionlimit(10**9)",
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))",
        "import gc; gc.disable(); sys.settrace(lambda *a: None)",
        "import builtins; builtins.print = builtins.open = None",
        "import logging; logging.basicConfig(stream=sys.stdout, level=0); logging.error('loud')",
        "import warnings; warnings.warn('old')",
    ],
)
def test_changes_of_a_module_stay_in_the_child_process(project, module, source, capfd):
    path = module(f"{source}\n{GOOD}")
    before = (Path.cwd(), list(sys.path), dict(os.environ), sys.getrecursionlimit(), sys.stdout, open)
    begun = time.monotonic()
    check_file(path)
    assert time.monotonic() - begun < 60
    assert (Path.cwd(), list(sys.path), dict(os.environ), sys.getrecursionlimit(), sys.stdout, open) == before
    assert "m" not in sys.modules
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    "source",
    [
        GOOD,
        "f = lambda response: 1.0",
        "def f(**kwargs): return 1.0",
        "def f(response, *, scale=2.0): return scale",
        "import functools\ndef g(scale, response): return scale\nf = functools.partial(g, 2.0)",
        "import functools\ndef log(g):\n    @functools.wraps(g)\n    def wrapped(*a, **k): return g(*a, **k)\n"
        "    return wrapped\n@log\ndef f(response): return 1.0",
        "class R:\n    def __call__(self, response): return 1.0\nf = R()",
        "class R:\n    def score(self, response): return 1.0\nf = R().score",
        "from statistics import fmean\ndef f(response): return fmean([1.0])",
    ],
)
def test_functions_of_every_kind_are_accepted(module, source):
    check_file(module(source))


@pytest.mark.parametrize(
    ("place", "wanted"),
    [
        ("random:f", "the module 'random' is Python's own, and not {folder}/random.py; rename that file"),
        ("yaml:f", "the module 'yaml' is another one ("),
        ("folder:f", "module 'folder' is a folder without __init__.py and has no function 'f'; name a module in it"),
        ("m.py:f", "there is no module 'm.py'; write its name without `.py`"),
        ("folder.m:f", "there is no module 'folder.m'; put folder/m.py beside the pipeline file"),
        ("m.sub:f", "there is no module 'm.sub'; put m/sub.py beside the pipeline file"),
        (".m:f", "is not `module:function`"),
        ("m.:f", "is not `module:function`"),
        ("m:", "is not `module:function`"),
        ("m:f.g", "module 'm' has no function 'f.g'; choose from: f"),
        ("latin:f", "fails at {folder}/latin.py"),
        ("broken.sub:f", "fails at {folder}/broken/__init__.py:1: ZeroDivisionError: division by zero"),
        ("math:hypot", "`math:hypot` does not say its parameters (no signature found"),
    ],
)
def test_names_of_modules_and_functions(project, place, wanted):
    for name in ("random", "yaml", "m"):
        project.write(f"{name}.py", GOOD)
    (project.folder / "folder").mkdir()
    project.write("broken/__init__.py", "1 / 0")
    (project.folder / "latin.py").write_bytes(b"x = '\xe9'\n" + GOOD.encode())
    path = project.pipeline(("fn: exact}", f'fn: "{place}"}} #!'))
    project.assert_problem(path, "nodes.reward.fn", wanted.format(folder=project.folder.resolve()))


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to(path)])
def test_a_module_that_is_no_file(project, make):
    make(project.folder / "m.py")
    assert_told(project, project.pipeline(REWARD), "there is no module 'm'; put m.py beside the pipeline file")


USES = [
    ("{op: reward, fn: exact}", "{op: m:f}", "nodes.reward.op"),
    ("{op: reward, fn: exact}", "{op: reward, fn: m:f}", "nodes.reward.fn"),
    (
        "{op: reward, fn: exact}",
        "{op: judge, endpoint: 'http://h/v1', model: x, prompt: '{response}', parser: m:f}",
        "nodes.reward.parser",
    ),
    ("estimator: grpo", "estimator: m:f", "nodes.advantage.estimator"),
    ("{kl_coef: 0.01}", "{kl_coef: 0.01, policy: m:f}", "nodes.update.loss.policy"),
    ("n: 4,", "n: 4, tools: [m:f],", "nodes.rollout.tools[0]"),
    ("n: 4,", "n: 4, environment: m:f,", "nodes.rollout.environment"),
    ("n: 4,", "n: 4, tools: [calculator], tool_format: m:f,", "nodes.rollout.tool_format"),
    ("prompts_per_step: 8", "prompts_per_step: 8\n  val_vote: m:f", "data.val_vote"),
    ("  ref: {", "  filter: {op: filter, fn: m:f}\n  ref: {", "nodes.filter.fn"),
]


@pytest.mark.parametrize(("old", "new", "place"), USES)
def test_wherever_a_function_is_named(project, old, new, place):
    project.write("m.py", "import os; os._exit(0)")
    problem = next(each for each in project.problems(project.pipeline((old, new))) if each.place == place)
    assert "importing 'm' ends the process with exit code 0" in problem.message
    assert "m" not in sys.modules


REPLIES = "{op: judge, endpoint: 'http://h/v1', model: x, prompt: '{response}', parser: m:f}"
FILTER = ("  ref: {", "  filter: {op: filter, fn: m:f} #!\n  ref: {")
WORLD = ("n: 4, sampling: {max_new_tokens: 8}}", "n: 4, environment: m:f, sampling: {max_new_tokens: 8}} #!")
TOOL = ("n: 4, sampling: {max_new_tokens: 8}}", "n: 4, tools: [m:f], sampling: {max_new_tokens: 8}} #!")
VOTE = ("prompts_per_step: 8", "prompts_per_step: 8\n  val_vote: m:f #!")
JUDGE = ("{op: reward, fn: exact}", f"{REPLIES} #!")
OP = ("  ref: {", "  own: {op: m:f} #!\n  ref: {")
ESTIMATOR = ("estimator: grpo}", "estimator: m:f} #!")
LOSS = ("{kl_coef: 0.01}}", "{kl_coef: 0.01, policy: m:f}} #!")
NODE = "import dagrl\n@dagrl.node(reads=['reward'], writes=['x'])\n"
CLASS = "class f:\n    def reset(self): ...\n    def step(self, response): ...\n"
TOOLS = "import dagrl\n@dagrl.tool\n"
ROLES = [
    (OP, "nodes.own.op", f"{NODE}async def f(batch): ...", "`m:f` is async"),
    (OP, "nodes.own.op", f"{NODE}def f(batch): yield {{}}", "`m:f` yields"),
    (OP, "nodes.own.op", f"{NODE}def f(): ...", "`m:f` cannot be called: too many positional"),
    (OP, "nodes.own.op", f"{NODE}def f(*, batch): ...", "`m:f` cannot be called"),
    (OP, "nodes.own.op", f"{NODE}class f: ...", "`m:f` cannot be called"),
    (
        OP,
        "nodes.own.op",
        NODE.replace("'reward'", "1") + "def f(batch): ...",
        "1 is not the name of a column that the node reads",
    ),
    (
        OP,
        "nodes.own.op",
        NODE.replace("['reward']", "None") + "def f(batch): ...",
        "are a list of names, not None",
    ),
    (OP, "nodes.own.op", "import dagrl\nf = dagrl.node(reads=['reward'], writes=['x'])(3)", "AttributeError"),
    (ESTIMATOR, "nodes.advantage.estimator", "import dagrl\n@dagrl.estimator()\nasync def f(batch): ...", "is async"),
    (ESTIMATOR, "nodes.advantage.estimator", "import dagrl\n@dagrl.estimator()\ndef f(batch): yield 1", "`m:f` yields"),
    (
        ESTIMATOR,
        "nodes.advantage.estimator",
        "import dagrl\n@dagrl.estimator(reads=[None])\ndef f(batch): ...",
        "None is not the name of a column",
    ),
    (ESTIMATOR, "nodes.advantage.estimator", "f = print", "does not declare its columns; decorate it"),
    (LOSS, "nodes.update.loss.policy", "import dagrl\n@dagrl.loss()\nasync def f(tokens): ...", "`m:f` is async"),
    (LOSS, "nodes.update.loss.policy", "import dagrl\n@dagrl.loss()\ndef f(): ...", "`m:f` cannot be called"),
    (JUDGE, "nodes.reward.parser", "async def f(reply): ...", "`m:f` is async"),
    (JUDGE, "nodes.reward.parser", "def f(reply): yield 1.0", "`m:f` yields"),
    (JUDGE, "nodes.reward.parser", "def f(reply, /): ...", "by position"),
    (JUDGE, "nodes.reward.parser", "import operator\nf = operator.itemgetter(1)", "does not say its parameters"),
    (VOTE, "data.val_vote", "async def f(response): ...", "`m:f` is async"),
    (VOTE, "data.val_vote", "def f(): ...", "`m:f` cannot be called"),
    (VOTE, "data.val_vote", "def f(*, response): ...", "`m:f` cannot be called"),
    (FILTER, "nodes.filter.fn", "async def f(reward): ...", "`m:f` is async"),
    (FILTER, "nodes.filter.fn", "def f(reward): yield True", "`m:f` yields"),
    (FILTER, "nodes.filter.fn", "def f(*columns): ...", "columns are given by name"),
    (FILTER, "nodes.filter.fn", "def f(): ...", "takes no column"),
    (WORLD, "nodes.rollout.environment", "def f(): ...", "is no class"),
    (WORLD, "nodes.rollout.environment", CLASS.replace("def step", "async def step"), "`m:f.step` is async"),
    (WORLD, "nodes.rollout.environment", CLASS.replace("def reset", "async def reset"), "`m:f.reset` is async"),
    (WORLD, "nodes.rollout.environment", CLASS.replace("...", "yield"), "`m:f.reset` yields"),
    (WORLD, "nodes.rollout.environment", CLASS.replace("reset(self)", "reset(self, seed, /)"), "by position"),
    (WORLD, "nodes.rollout.environment", CLASS.replace("step(self, response)", "step(self)"), "cannot be called"),
    (WORLD, "nodes.rollout.environment", CLASS + "    def __init__(self, size): ...", "cannot be called: missing"),
    (WORLD, "nodes.rollout.environment", "from typing import Protocol as f", "has no method reset"),
    (TOOL, "nodes.rollout.tools[0]", f"{TOOLS}def f(x: int): ...", "has no docstring"),
    (TOOL, "nodes.rollout.tools[0]", f"{TOOLS}def f(x: 'absent'):\n    'Do.'", "name 'absent' is not defined"),
    (TOOL, "nodes.rollout.tools[0]", f"{TOOLS}def f(x: 'os._exit(3)'):\n    'Do.'", "the process with exit code 3"),
    (TOOL, "nodes.rollout.tools[0]", f"{TOOLS}def f(x: '1 / 0'):\n    'Do.'", "ZeroDivisionError"),
    (TOOL, "nodes.rollout.tools[0]", f"{TOOLS}def f(x: 'x:'):\n    'Do.'", "SyntaxError"),
    (TOOL, "nodes.rollout.tools[0]", "def f(x: int):\n    'Do.'", "is not declared as a tool"),
    (TOOL, "nodes.rollout.tools[0]", f"{TOOLS}class f:\n    'Do.'\n    __slots__ = 3", "TypeError"),
]


@pytest.mark.parametrize(("edit", "place", "source", "wanted"), ROLES)
def test_requirements_on_a_function_by_its_role(project, edit, place, source, wanted):
    project.write("m.py", f"import os, sys, time\n{source}\n")
    path = project.pipeline(edit)
    told = [each for each in project.problems(path) if each.place == place]
    assert len(told) == 1, told
    assert wanted in told[0].message
    assert "; " in told[0].message
    assert "\n" not in str(told[0])


def test_a_module_whose_thread_exits_later_is_reported_and_no_other(project):
    project.write(
        "m.py", "import dagrl, os, threading\n@dagrl.node(reads=['reward'], writes=['x'])\ndef op(batch): ...\n"
    )
    project.write("bomb.py", "import os, threading, time\nthreading.Timer(0.1, os._exit, [4]).start()\n" + GOOD)
    project.write("slow.py", "import time; time.sleep(0.5)\n" + GOOD)

    def found(module):
        return ask(f"{module}:f", name_of, folder=project.folder)

    with isolated_imports():
        assert found("bomb") == "bomb:f"
        time.sleep(0.3)
        assert found("slow") == "slow:f"


def test_a_module_is_imported_once_for_all_questions_and_checks(project, module):
    path = module("with open('imports.txt', 'a') as file: file.write('x')\n" + GOOD)
    os.chdir(project.folder)
    with isolated_imports():
        check_file(path)
        check_file(path)
    assert (project.folder / "imports.txt").read_text() == "x"


def test_no_child_is_made_where_no_module_is_named(project, monkeypatch):
    monkeypatch.delattr(os, "fork")
    check_file(project.folder / "p.yaml")


def test_the_child_and_what_it_has_started_end_with_the_check(project, module):
    check_file(
        module(
            f"import subprocess\nopen('{project.folder}/pids', 'w').write("
            f'f\'{{os.getpid()}} {{subprocess.Popen(["sleep", "99"]).pid}}\')\n{GOOD}'
        )
    )
    for process in (project.folder / "pids").read_text().split():
        end = time.monotonic() + 5
        while is_running(process) and time.monotonic() < end:
            time.sleep(0.01)
        assert not is_running(process)


def is_running(process: str) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def dagrl(*arguments: object, **options) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from dagrl.cli import main; raise SystemExit(main())", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, **options)


def test_the_commands_say_it_in_one_line_and_exit_2(project, module):
    path = module("os._exit(0)")
    for command in ("validate", "plan", "graph", "run"):
        if command == "graph":
            path = project.pipeline(("{op: reward, fn: exact}", "{op: m:f}"))
        done = dagrl(command, path, cwd=project.folder)
        assert (done.returncode, done.stdout) == (2, "")
        (line,) = done.stderr.splitlines()
        assert line.startswith(f"{path}:")
        assert "ends the process with exit code 0" in line
    assert not (project.folder / "runs").exists()


def test_output_of_a_module_is_not_in_the_json(project, module):
    path = module(
        textwrap.dedent("""\
        print('loud'); os.write(1, b'louder'); print('loud', file=sys.stderr)
        import atexit, threading
        atexit.register(print, 'late'); threading.Thread(target=time.sleep, args=(99,)).start()
        """)
        + GOOD
    )
    done = dagrl("plan", path, "--json", "--gpu", "H100")
    assert json.loads(done.stdout)
    assert "loud" not in done.stderr
    validated = dagrl("validate", path)
    assert (validated.returncode, "loud" in validated.stdout + validated.stderr) == (0, False)


def test_a_long_wait_is_reported(project, module, capfd):
    from dagrl.plugins import isolation

    path = module(f"time.sleep(1.0)\n{GOOD}")
    before, isolation._NOTICE_AFTER_S = isolation._NOTICE_AFTER_S, 0.3
    try:
        check_file(path)
    finally:
        isolation._NOTICE_AFTER_S = before
    assert capfd.readouterr().err == "dagrl: importing m, for at most 60 s ...\n"

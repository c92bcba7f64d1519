"""The rendezvous on the loopback interface: real connections, without Ray."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from dagrl.config.loading.loader import load_pipeline
from dagrl.config.schema import Pipeline
from dagrl.launcher import addresses, connection, handshake, leader
from dagrl.launcher.command import offered
from dagrl.launcher.connection import Connection, LostError, listen
from dagrl.launcher.errors import LaunchError
from dagrl.launcher.follower import follow
from dagrl.launcher.job import Job
from dagrl.launcher.node_rank import NodeRank
from dagrl.launcher.ray_node import RayNode, ray_environment
from dagrl.launcher.rendezvous import Peer, Rendezvous
from dagrl.scheduler.machines import Machine
from dagrl.workers.listener import listen as free_listener

LOOPBACK = "127.0.0.1"


class Recorder(Rendezvous):
    """A rendezvous that queues what happens: a peer that joined, a rank that left, a sentence on a failure."""

    def __init__(self, job: Job, shared_token: str | None = None, pipeline: str = "") -> None:
        super().__init__(job.node_rank, shared_token, pipeline)
        self.events: asyncio.Queue[Peer | int | str] = asyncio.Queue()

    def joined(self, peer: Peer) -> None:
        self.events.put_nowait(peer)

    def left(self, peer: Peer, why: str) -> None:
        self.events.put_nowait(peer.rank)

    def failed(self, sentence: str) -> None:
        self.events.put_nowait(sentence)


@pytest.fixture
def port() -> int:
    """One that the kernel gives to no outgoing connection before rank 0 listens on it."""
    with free_listener(LOOPBACK) as listening:
        return listening.getsockname()[1]


@pytest.fixture
def make_job(port, lab, tmp_path: Path):
    """Rank and changes -> a job of three machines, and its notes."""
    pipeline = load_pipeline(lab.write_pipeline(tmp_path, lab.tiny_pipeline()), ["run.start_timeout_s=5"]).pipeline

    def make(rank: int, *, nodes: int = 3, variables: dict[str, str] | None = None) -> tuple[Job, list[str]]:
        said: list[str] = []
        node_rank, machine = NodeRank(rank, nodes, nodes, LOOPBACK, port, None), Machine(f"host{rank}", 0, 2)
        variables = {"RAY_AUTH_TOKEN": ""} if variables is None else variables
        return Job(node_rank, machine, pipeline, [], tmp_path / "logs", variables, said.append), said

    return make


def run(meeting) -> None:
    asyncio.run(asyncio.wait_for(meeting, 30))


@pytest.fixture(autouse=True)
def _isolated(monkeypatch, tmp_path: Path):
    """No token of the user, and no port that other machines can reach."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(addresses, "ANY", LOOPBACK)


def test_every_machine_joins_and_gets_the_exit_code(make_job):
    async def meeting():
        rendezvous = Recorder(make_job(0)[0])
        await rendezvous.open()
        jobs = [make_job(rank) for rank in (1, 2)]
        following = [asyncio.create_task(follow(job)) for job, _ in jobs]
        came = [await rendezvous.events.get() for _ in following]
        assert sorted(peer.rank for peer in came) == [1, 2]
        assert {peer.machine.cpus for peer in came} == {2}
        assert (rendezvous.missing, rendezvous.own_address) == ([], LOOPBACK)
        await rendezvous.close(7, "seven")
        assert [await each for each in following] == [7, 7]
        assert all(said[-1] == "seven" for _, said in jobs)

    run(meeting())


@pytest.mark.parametrize(
    ("nodes", "rank", "sentence"),
    [
        (4, 1, "PET_NNODES is 4 on"),
        (3, 2, "PET_NODE_RANK is 2 on"),
    ],
)
def test_a_machine_that_contradicts_the_others_ends_the_job(make_job, nodes, rank, sentence):
    async def meeting():
        rendezvous = Recorder(make_job(0)[0])
        await rendezvous.open()
        first = asyncio.create_task(follow(make_job(2)[0]))
        assert isinstance(await rendezvous.events.get(), Peer)
        job, said = make_job(rank, nodes=nodes)
        assert await follow(job) == 1
        assert said[-1].startswith(sentence)
        assert await rendezvous.events.get() == said[-1]
        await rendezvous.close(1, said[-1])
        assert await first == 1

    run(meeting())


@pytest.mark.parametrize("theirs", ["", "another"])
def test_only_machines_with_the_shared_token_join(make_job, theirs):
    async def meeting():
        rendezvous = Recorder(make_job(0)[0], "the token of the user")
        await rendezvous.open()
        job, said = make_job(1, variables={"RAY_AUTH_TOKEN": theirs})
        assert await follow(job) == 1
        assert "give all machines the same RAY_AUTH_TOKEN" in said[-1]
        assert rendezvous.peers == {} and rendezvous.drawn_token is None
        friend = asyncio.create_task(follow(make_job(1, variables={"RAY_AUTH_TOKEN": "the token of the user"})[0]))
        assert isinstance(await rendezvous.events.get(), Peer)
        await rendezvous.close(0, "")
        assert await friend == 0

    run(meeting())


def test_a_machine_of_another_job_is_refused(make_job):
    async def meeting():
        rendezvous = Recorder(make_job(0)[0], pipeline="another")
        await rendezvous.open()
        job, said = make_job(1)
        assert await follow(job) == 1
        assert "runs the pipeline another, and " in said[-1] and "wants to run tiny; give each job" in said[-1]
        assert rendezvous.peers == {} and rendezvous.events.empty()
        await rendezvous.close(0, "")

    run(meeting())


def test_a_machine_that_disconnects_can_join_again(make_job):
    async def meeting():
        rendezvous = Recorder(make_job(0)[0])
        await rendezvous.open()
        for _ in range(2):
            calling = asyncio.create_task(follow(make_job(1)[0]))
            assert isinstance(await rendezvous.events.get(), Peer)
            calling.cancel()
            await asyncio.wait([calling])
            assert await rendezvous.events.get() == 1
        assert rendezvous.missing == [1, 2]
        await rendezvous.close(1, "")

    run(meeting())


def test_other_protocols_are_refused(make_job):
    async def meeting():
        rendezvous = Recorder(make_job(0)[0])
        await rendezvous.open()
        for nonsense in (
            b"GET / HTTP/1.1\r\n\r\n",
            b"[1]\n",
            b'{"kind": "hello"}\n',
            b"x" * 200_000 + b"\n",
            b"\xff\n",
            b"[" * 60_000 + b"\n",
        ):
            reader, writer = await asyncio.open_connection(LOOPBACK, make_job(0)[0].node_rank.port)
            writer.write(nonsense)
            assert b"challenge" in await reader.readline()
            with contextlib.suppress(ConnectionResetError):
                await reader.read()
            writer.close()
        job, _ = make_job(1)
        friend = asyncio.create_task(follow(job))
        assert isinstance(await rendezvous.events.get(), Peer)
        await rendezvous.close(0, "")
        assert await friend == 0

    run(meeting())


def test_a_job_that_cannot_run_ends_on_all_machines(make_job):
    async def meeting():
        notes: list[str] = []
        first, _ = make_job(1)
        calling = asyncio.create_task(follow(first))
        dismissing = asyncio.create_task(leader.dismiss(make_job(0)[0].node_rank, 2, "the file is wrong", notes.append))
        assert await calling == 2
        # The last machine ends the wait.
        second, said = make_job(2)
        assert await follow(second) == 2
        assert said[-1] == "the file is wrong"
        await dismissing

    run(meeting())


def test_missing_ranks_are_named_with_the_time_that_is_left(make_job, monkeypatch):
    clock = 0.0

    async def nothing(_, timeout_s: float) -> bool:
        nonlocal clock
        # No process wakes up to the moment.
        clock += timeout_s + 0.01
        return False

    monkeypatch.setattr(leader, "_PROGRESS_S", 2.0)
    monkeypatch.setattr(leader, "time", SimpleNamespace(monotonic=lambda: clock))
    monkeypatch.setattr(leader._Leader, "_change", nothing)
    job, said = make_job(0)

    async def meeting():
        assert await leader.lead(job) == 1

    run(meeting())
    assert [note.rpartition("; ")[2] for note in said[:-1]] == ["3 s left", "1 s left", "0 s left"]
    assert all("waiting for ranks 1, 2 of 3 machines" in note for note in said[:-1])
    assert said[-1].startswith("waited 5 s for ranks 1, 2 of 3 machines")


def test_a_machine_that_does_not_join_ray_is_named(make_job, monkeypatch):
    """The lines that Ray's head prints stand in for it, in a cluster that no machine joins."""
    monkeypatch.setattr(leader, "_PROGRESS_S", 0.5)

    async def start_head(node: RayNode) -> None:
        node.on_line('{"address": "here:1"}')
        node.on_line(json.dumps({"alive": ["192.0.2.1"]}))

    async def start_member(_node: RayNode, _head: str) -> None:
        pass

    monkeypatch.setattr(RayNode, "start_head", start_head)
    monkeypatch.setattr(RayNode, "start_member", start_member)

    async def meeting():
        (first, said), (second, _) = (make_job(rank, nodes=2) for rank in (0, 1))
        first = replace(first, pipeline=_with_start_timeout(first.pipeline, 1.2))
        assert await asyncio.gather(leader.lead(first), follow(second)) == [1, 1]
        named = rf"Ray on rank 1 \(.*, {LOOPBACK}\); "
        assert any(re.match(rf"waiting for {named}\d s left", note) for note in said)
        assert re.match(f"waited 1.2 s for {named}can all machines", said[-1])

    run(meeting())


def _with_start_timeout(pipeline: Pipeline, seconds: float) -> Pipeline:
    return pipeline.model_copy(update={"run": pipeline.run.model_copy(update={"start_timeout_s": seconds})})


@pytest.mark.parametrize(
    ("master", "sentence"),
    [
        ("203.0.113.9", "PET_MASTER_ADDR is `203.0.113.9` (203.0.113.9), and rank 0 has"),
        ("no.such.name.invalid", "PET_MASTER_ADDR is `no.such.name.invalid`, which rank 0 cannot resolve"),
    ],
)
def test_rank_0_must_be_at_its_address(make_job, monkeypatch, master, sentence):
    monkeypatch.setattr(addresses, "_RESOLVE_TIMEOUT_S", 0.0)
    with pytest.raises(LaunchError, match=re.escape(sentence)) as caught:
        asyncio.run(addresses.listening_address(replace(make_job(0)[0].node_rank, master=master)))
    assert caught.value.code == 2


def test_a_master_named_localhost_listens_on_all_addresses(make_job):
    node_rank = replace(make_job(0)[0].node_rank, master="localhost")
    assert asyncio.run(addresses.listening_address(node_rank)) == addresses.ANY
    assert addresses.is_loopback(node_rank.master)
    assert not addresses.is_loopback("10.9.8.7")


def test_both_sides_notice_missing_heartbeats(monkeypatch, port):
    monkeypatch.setattr(connection, "SILENCE_S", 0.3)
    monkeypatch.setattr(connection, "HEARTBEAT_S", 60.0)
    lost = []

    async def listening(mine: Connection):
        with pytest.raises(LostError, match=r"no heartbeat for 0\.3 s"):
            await mine.recv()
        lost.append("server")

    async def meeting():
        server = await listen(LOOPBACK, port, listening)
        # Each side sends one heartbeat at its start.
        mine = await Connection.open(LOOPBACK, port, 5)
        with pytest.raises(LostError, match=r"no heartbeat for 0\.3 s|closed"):
            await mine.recv()
        await mine.close()
        server.close()

    run(meeting())
    assert lost == ["server"]


def test_a_token_is_proved_without_being_sent():
    proof = handshake.prove("mine", "challenge")
    assert "mine" not in proof
    assert handshake.is_proof(proof, "mine", "challenge")
    assert not handshake.is_proof(proof, "mine", "another")
    assert not handshake.is_proof(handshake.prove("other", "challenge"), "mine", "challenge")
    assert not handshake.is_proof(None, "mine", "challenge")
    assert not handshake.is_proof("\ud800", "mine", "challenge")


def test_the_shared_token_is_where_ray_looks_for_it(tmp_path: Path):
    (tmp_path / "token").write_text("from a file\n")
    path = {"RAY_AUTH_TOKEN_PATH": str(tmp_path / "token")}
    assert handshake.shared_token({}) is None
    assert handshake.shared_token(path) == "from a file"
    assert handshake.shared_token(path | {"RAY_AUTH_TOKEN": "said"}) == "said"
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("at home")
    assert handshake.shared_token({}) == "at home"


def test_rays_environment_names_the_token_and_does_not_hold_it(tmp_path: Path):
    path = handshake.write_token("secret", tmp_path)
    assert path.stat().st_mode & 0o777 == 0o600
    environment = ray_environment({"RAY_AUTH_TOKEN": "secret", "RAY_ADDRESS": "x", "KEPT": "1"}, LOOPBACK, path)
    assert "secret" not in environment.values() and "RAY_ADDRESS" not in environment
    assert (environment["KEPT"], environment["RAY_AUTH_TOKEN_PATH"]) == ("1", str(path))
    assert environment["GLOO_SOCKET_IFNAME"] == "lo"
    assert ray_environment({"GLOO_SOCKET_IFNAME": "ib0"}, LOOPBACK, path)["GLOO_SOCKET_IFNAME"] == "ib0"


def test_another_version_is_named():
    ours = handshake.versions()
    assert handshake.version_difference(ours, ours) == ""
    assert handshake.version_difference(ours | {"ray": "2.0"}, ours).startswith("ray 2.0, and rank 0 has ")
    assert handshake.version_difference({}, ours).startswith("dagrl None")


def test_resources_of_a_machine(make_job):
    job, _ = make_job(1)
    node_rank = job.node_rank
    assert offered(node_rank, job.pipeline, gpus=0, cpus=1) == Machine(socket.gethostname(), 0, 2), "as the groups ask"
    assert offered(node_rank, job.pipeline, gpus=8, cpus=96) == Machine(socket.gethostname(), 8, 96)
    assert offered(replace(node_rank, slots=4), job.pipeline, gpus=8, cpus=96).gpus == 4
    assert offered(replace(node_rank, slots=4), job.pipeline, gpus=0, cpus=96) == Machine(socket.gethostname(), 0, 4)
    with pytest.raises(LaunchError, match=r"PET_NPROC_PER_NODE is 8 and .* \(rank 1\) has 4 GPUs to use; set it to 4"):
        offered(replace(node_rank, slots=8), job.pipeline, gpus=4, cpus=96)


def test_a_stop_signal_after_the_run_changes_nothing(make_job, monkeypatch):
    stops: list[int] = []

    class Driver:
        async def wait(self) -> int:
            return 3

    async def start_head(node: RayNode) -> None:
        node.on_line('{"address": "here:1"}')
        node.on_line(json.dumps({"alive": ["192.0.2.1", "192.0.2.2"]}))

    async def start_driver(_node: RayNode, _head: str, _arguments: list[str]) -> Driver:
        return Driver()

    async def close(rendezvous: Rendezvous, code: int, why: str) -> None:
        rendezvous.stop_requested(rendezvous.peers[1], 1)
        stops.append(code)
        await Rendezvous.close(rendezvous, code, why)

    async def start_member(_node: RayNode, _head: str) -> None:
        pass

    monkeypatch.setattr(RayNode, "start_head", start_head)
    monkeypatch.setattr(RayNode, "start_driver", start_driver)
    monkeypatch.setattr(RayNode, "start_member", start_member)
    monkeypatch.setattr(leader._Leader, "close", close)

    async def meeting():
        (first, said), (second, _) = (make_job(rank, nodes=2) for rank in (0, 1))
        assert await asyncio.gather(leader.lead(first), follow(second)) == [3, 3]
        assert not any("stop" in note for note in said)

    run(meeting())
    assert stops == [3]

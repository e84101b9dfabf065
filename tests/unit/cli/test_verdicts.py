"""What `outerstep doctor` says of each thing it can find, and what to do about it."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

import pytest

from outerstep.cli import verdicts
from outerstep.cli.verdicts import DiskProbe, Finding, Gpu, Gpus, LinkSpeed, ShownCertificate
from outerstep.errors import NotFound, OuterstepError, TlsRequired, TransportError, Unauthorized, UntrustedServer

NOW = datetime(2026, 6, 1, tzinfo=UTC)
PIN, OTHER = "a" * 64, "b" * 64
H200 = Gpu("NVIDIA H200", 139 << 30, 137 << 30)
STATUS = {"outerstep": "0.1.0", "run_id": "r", "sync_round": 7, "workers": {"w": {}}, "failure": "", "closing": ""}
PLAN = {"codec": "bf16", "down_codec": "bf16", "sync_every": 500}


def failed(number: int) -> OSError:
    return OSError(number, os.strerror(number))


class TestSoftware:
    def test_versions_are_named(self) -> None:
        finding = verdicts.software("3.11.7", "0.1.0", "2.6.0")
        assert (finding.level, finding.found) == ("ok", "Python 3.11.7, outerstep 0.1.0, torch 2.6.0")

    def test_without_torch_nothing_trains(self) -> None:
        finding = verdicts.software("3.11.7", "0.1.0", "", "libgomp.so.1 not found")
        assert finding.level == "fail"
        assert "libgomp" in finding.found


class TestGpu:
    def test_none_is_nothing_to_worry_about(self) -> None:
        assert verdicts.gpus(Gpus()).level == "ok"
        assert verdicts.gpus(Gpus(built_for="CUDA 12.4")).level == "ok"

    def test_one_is_named_with_memory_driver_and_build(self) -> None:
        finding = verdicts.gpus(Gpus("CUDA 12.4", "550.54", [H200]))
        assert finding.level == "ok"
        for word in ("H200", "149.3 GB", "550.54", "CUDA 12.4"):
            assert word in finding.found

    def test_one_that_somebody_uses_is_pointed_out(self) -> None:
        finding = verdicts.gpus(Gpus("CUDA 12.4", "550.54", [H200, Gpu("NVIDIA H200", 139 << 30, 3 << 30)]))
        assert finding.level == "warn"
        assert "GPU 1" in finding.remedy

    @pytest.mark.parametrize(
        ("facts", "said"),
        [
            (Gpus("", "550.54"), "built without CUDA"),
            (Gpus("CUDA 13.0", "470.10", error="driver too old"), "built for CUDA 13.0; driver too old"),
            (Gpus("CUDA 12.4", "550.54", visible=""), "CUDA_VISIBLE_DEVICES='' hides them"),
        ],
    )
    def test_a_driver_without_a_usable_gpu_says_why(self, facts: Gpus, said: str) -> None:
        finding = verdicts.gpus(facts)
        assert finding.level == "warn"
        assert said in finding.found
        assert finding.remedy


class TestMachine:
    @pytest.mark.parametrize(
        ("cores", "seen", "omp", "level"),
        [(8, 8, None, "ok"), (8, 8, "4", "ok"), (2, 64, None, "warn"), (2, 64, "2", "ok"), (2, 2, "16", "warn")],
    )
    def test_threads_must_not_outnumber_cores(self, cores: int, seen: int, omp: str | None, level: str) -> None:
        assert verdicts.threads(cores, seen, omp).level == level

    def test_several_workers_share_the_cores(self) -> None:
        assert "OMP_NUM_THREADS=4 for two" in verdicts.threads(8, 8, None).remedy

    @pytest.mark.parametrize(("soft", "level"), [(1024, "ok"), (255, "warn")])
    def test_open_files(self, soft: int, level: str) -> None:
        assert verdicts.open_files(soft, 1 << 20).level == level

    def test_a_disk_with_room_is_fine(self) -> None:
        finding = verdicts.disk(DiskProbe("save_dir", "/data", "/data", 10 << 40, 0.002))
        assert (finding.check, finding.level) == ("save_dir", "ok")
        assert "2.0 ms" in finding.found

    def test_a_folder_that_is_not_there_yet_is_looked_at_where_it_would_be(self) -> None:
        assert (
            "(to be made in /data)" in verdicts.disk(DiskProbe("save_dir", "/data/run", "/data", 10 << 40, 0.002)).found
        )

    @pytest.mark.parametrize(
        ("number", "remedy"),
        [
            (errno.ENOSPC, "the disk is full"),
            (errno.EROFS, "mounted read-only"),
            (errno.EACCES, "another user owns it"),
            (errno.EDQUOT, "quota"),
            (errno.EIO, "dmesg"),
            (errno.ENOENT, "choose another folder"),
        ],
    )
    def test_one_that_cannot_be_written_fails_with_the_reason(self, number: int, remedy: str) -> None:
        finding = verdicts.disk(DiskProbe("save_dir", "/data", "/data", error=failed(number)))
        assert finding.level == "fail"
        assert os.strerror(number) in finding.found
        assert remedy in finding.remedy

    def test_little_room_and_slow_syncs_are_warnings(self) -> None:
        assert verdicts.disk(DiskProbe("save_dir", "/d", "/d", 1 << 30, 0.002)).level == "warn"
        assert "network folder" in verdicts.disk(DiskProbe("save_dir", "/d", "/d", 10 << 40, 0.5)).remedy

    @pytest.mark.parametrize(("folder", "mode"), [(True, "700"), (False, "600")])
    def test_secrets_that_others_can_read_fail(self, folder: bool, mode: str) -> None:
        finding = verdicts.secrets("/c", True, [("/c/x", 0o644, folder)])
        assert finding.level == "fail"
        assert "0644" in finding.found
        assert finding.remedy == f"chmod {mode} /c/x"

    def test_secrets_that_cannot_be_read_fail(self) -> None:
        finding = verdicts.unreadable("/c", PermissionError(errno.EACCES, "Permission denied", "/c/x"))
        assert (finding.level, finding.found) == ("fail", "/c/x cannot be read: Permission denied")

    def test_no_secrets_yet_is_fine(self) -> None:
        assert verdicts.secrets("/c", False, []).level == verdicts.secrets("/c", True, []).level == "ok"


class TestWay:
    def test_a_name_without_an_address_fails(self) -> None:
        assert verdicts.name("nohost", [], "unknown").level == "fail"
        assert verdicts.name("host", ["10.0.0.1", "::1"]).found == "host is 10.0.0.1, ::1"

    @pytest.mark.parametrize(
        ("host", "error", "found", "remedy"),
        [
            ("10.0.0.1", ConnectionRefusedError(errno.ECONNREFUSED, "refused"), "nobody listens", "--host 0.0.0.0"),
            ("127.0.0.1", ConnectionRefusedError(errno.ECONNREFUSED, "refused"), "nobody listens", "start it"),
            ("10.0.0.1", TimeoutError("timed out"), "does not answer", "firewall"),
            ("10.0.0.1", failed(errno.ETIMEDOUT), "does not answer", "ufw allow 8512/tcp"),
            ("10.0.0.1", failed(errno.EHOSTUNREACH), "no route to", "VPN"),
            ("10.0.0.1", failed(errno.ENETUNREACH), "no route to", "VPN"),
            ("10.0.0.1", failed(errno.EPERM), "not permitted", "reaches others"),
        ],
    )
    def test_each_way_not_to_get_through_has_its_own_remedy(
        self, host: str, error: OSError, found: str, remedy: str
    ) -> None:
        finding = verdicts.port(host, 8512, error, 0.0)
        assert finding.level == "fail"
        assert found in finding.found
        assert remedy in finding.remedy

    def test_an_open_port_is_fine(self) -> None:
        assert verdicts.port("::1", 8512, None, 0.01).found == "[::1]:8512 takes connections (10 ms)"

    def test_the_known_certificate_is_fine(self) -> None:
        shown = ShownCertificate(PIN, NOW - timedelta(days=1), NOW + timedelta(days=1))
        finding = verdicts.certificate("h:1", PIN, True, shown, NOW)
        assert finding.level == "ok"
        assert "2026-06-02" in finding.found

    def test_another_one_fails_and_shows_both(self) -> None:
        finding = verdicts.certificate("h:1", PIN, True, ShownCertificate(OTHER), NOW)
        assert finding.level == "fail"
        assert PIN in finding.found
        assert OTHER in finding.found
        assert "outerstep join" in finding.remedy

    def test_an_expired_one_is_a_warning_because_only_the_fingerprint_counts(self) -> None:
        shown = ShownCertificate(PIN, NOW - timedelta(days=9), NOW - timedelta(days=1))
        assert verdicts.certificate("h:1", PIN, True, shown, NOW).level == "warn"

    def test_a_plain_port_says_what_to_write(self) -> None:
        shown = ShownCertificate(error=UntrustedServer("h:1 does not speak TLS. Nothing was sent. If …"))
        finding = verdicts.certificate("h:1", PIN, True, shown, NOW)
        assert (finding.level, finding.found) == ("fail", "h:1 does not speak TLS")
        assert "http://h:1" in finding.remedy

    def test_a_broken_handshake_fails(self) -> None:
        assert verdicts.certificate("h:1", PIN, True, ShownCertificate(error=OSError("reset")), NOW).level == "fail"

    def test_no_encryption_at_all_is_a_warning(self) -> None:
        assert verdicts.unencrypted("h:1").level == "warn"


class TestServer:
    @pytest.mark.parametrize(("kind", "level"), [("run", "ok"), ("worker", "ok"), ("", "ok"), ("admin", "warn")])
    def test_an_accepted_token_is_named_by_its_role(self, kind: str, level: str) -> None:
        assert verdicts.token(kind, STATUS).level == level

    @pytest.mark.parametrize(
        ("error", "found", "remedy"),
        [
            (Unauthorized("not valid here", hint="join again"), "not valid here", "join again"),
            (TlsRequired("this port speaks TLS"), "requires TLS", "leave http:// out"),
            (TransportError("no answer"), "no answer", ""),
        ],
    )
    def test_a_refused_one_fails(self, error: OuterstepError, found: str, remedy: str) -> None:
        finding = verdicts.token("run", None, error)
        assert finding.level == "fail"
        assert found in finding.found
        assert finding.remedy == remedy

    @pytest.mark.parametrize(
        ("changes", "protocol", "level", "said"),
        [
            ({}, 2, "ok", "outerstep 0.1.0, protocol 2, run r, round 7, 1 worker"),
            ({}, 1, "warn", "here the newest is protocol 2"),
            ({"outerstep": "0.2.0"}, 1, "warn", "here it is 0.1.0 and the newest is protocol 2"),
            ({}, None, "ok", "outerstep 0.1.0, run r, round 7"),
            ({"outerstep": "0.2.0"}, 2, "warn", "here it is 0.1.0"),
            ({"failure": "disk on fire"}, 2, "fail", "disk on fire"),
            ({"closing": "budget spent"}, 2, "warn", "budget spent"),
        ],
    )
    def test_versions_and_health(self, changes: dict[str, str], protocol: int | None, level: str, said: str) -> None:
        finding = verdicts.server({**STATUS, **changes}, "0.1.0", protocol)
        assert finding.level == level
        assert said in finding.found + finding.remedy

    @pytest.mark.parametrize(
        ("ahead_s", "level", "said"), [(0.2, "ok", "0.2 s"), (90, "warn", "1m30s ahead"), (-90, "warn", "behind")]
    )
    def test_clocks_far_apart_are_a_warning(self, ahead_s: float, level: str, said: str) -> None:
        assert verdicts.clock(ahead_s).level == level
        assert said in verdicts.clock(ahead_s).found

    @pytest.mark.parametrize(("samples", "level"), [([0.1, 0.2, 9.0], "ok"), ([1.5, 1.6, 1.7], "warn")])
    def test_latency_is_a_median(self, samples: Sequence[float], level: str) -> None:
        assert verdicts.latency(samples).level == level

    def test_bandwidth_is_said_in_bits(self) -> None:
        assert verdicts.bandwidth(1.25e6, 2.5e8, 4).found == "up 10.0 Mbit/s, down 2.0 Gbit/s, over 4 connections"

    @pytest.mark.parametrize(("error", "level"), [(NotFound("?"), "warn"), (TransportError("reset"), "fail")])
    def test_what_cannot_be_measured_is_said(self, error: OuterstepError, level: str) -> None:
        assert verdicts.unmeasured(error).level == level

    def test_an_exchange_is_up_and_down_and_a_few_round_trips(self) -> None:
        finding = verdicts.exchange(10**7, 2 * 10**7, LinkSpeed(1e6, 2e6, 0.2), PLAN, 0.0)
        assert finding.level == "ok"
        assert finding.found.startswith("about 21.0 s for 10.0 MB up (bf16) and 20.0 MB down (bf16), every 500 steps")

    @pytest.mark.parametrize(("steps_per_s", "level"), [(1.0, "ok"), (100.0, "warn")])
    def test_one_that_takes_half_the_time_between_two_is_a_warning(self, steps_per_s: float, level: str) -> None:
        finding = verdicts.exchange(10**7, 2 * 10**7, LinkSpeed(1e6, 2e6, 0.2), PLAN, steps_per_s)
        assert finding.level == level
        assert ("--sync-every" in finding.remedy) == (level == "warn")

    def test_without_a_model_nothing_is_estimated(self) -> None:
        assert isinstance(verdicts.no_model_yet(), Finding)
        assert verdicts.no_credentials("nothing is known here about h:1: give …").remedy == "give …"

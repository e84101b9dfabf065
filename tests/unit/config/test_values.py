"""Settings: checked where they are made, and every error names field, value and range."""

import re
from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from outerstep.config import DEFAULT_PORT, ServerConfig, WorkerConfig, build, outer_arguments, settings_of, values_of
from outerstep.errors import ConfigError

NAN, INF = float("nan"), float("inf")

SERVER_WHOLE_FROM_1 = [
    "num_workers",
    "min_workers",
    "sync_every",
    "num_fragments",
    "quorum",
    "pool_bytes",
    "max_connections",
    "part_size_bytes",
]
SERVER_WHOLE_FROM_0 = ["max_staleness", "port"]
SERVER_NUMBERS = [
    "heartbeat_timeout_s",
    "grace_s",
    "round_deadline_s",
    "start_deadline_s",
    "outer_lr",
    "outer_momentum",
]
WORKER_WHOLE_FROM_1 = ["sync_every", "num_fragments", "connections"]
WORKER_NUMBERS = ["heartbeat_interval_s", "join_timeout_s", "give_up_after_s", "exit_patience_s"]
SERVER_OPTIONAL = [
    "part_size_bytes",
    "sync_every",
    "num_fragments",
    "quorum",
    "pool_bytes",
    "port",
    "round_deadline_s",
    "start_deadline_s",
    "max_staleness",
    "outer_lr",
    "outer_momentum",
]
SERVER_RANGES = {
    **dict.fromkeys(SERVER_WHOLE_FROM_1, "a whole number ≥ 1"),
    **dict.fromkeys(SERVER_WHOLE_FROM_0, "a whole number ≥ 0"),
    **dict.fromkeys(SERVER_NUMBERS, "a number ≥ 0"),
}
WORKER_RANGES = {
    **dict.fromkeys(WORKER_WHOLE_FROM_1, "a whole number ≥ 1"),
    **dict.fromkeys(WORKER_NUMBERS, "a number ≥ 0"),
}
SERVER_REQUIRED = {name: range_ for name, range_ in SERVER_RANGES.items() if name not in SERVER_OPTIONAL}


def server(**settings: Any) -> ServerConfig:
    return build(ServerConfig, {"num_workers": 4, **settings})


def worker(**settings: Any) -> WorkerConfig:
    return build(WorkerConfig, {"server_addr": "127.0.0.1:8512", **settings})


class TestUnknownSettings:
    @pytest.mark.row("B17")
    @pytest.mark.parametrize(
        ("kind", "wrong", "meant"),
        [
            (ServerConfig, "sync_evry", "sync_every"),
            (ServerConfig, "num_worker", "num_workers"),
            (ServerConfig, "heartbeat_timeout_ms", "heartbeat_timeout_s"),
            (WorkerConfig, "on_exti", "on_exit"),
            (WorkerConfig, "server_address", "server_addr"),
        ],
    )
    def test_a_typo_is_answered_with_the_nearest_known_setting(self, kind: type, wrong: str, meant: str) -> None:
        with pytest.raises(ConfigError, match=f'unknown setting "{wrong}"; did you mean "{meant}"\\?'):
            build(kind, {wrong: 1})

    @pytest.mark.parametrize("kind", [ServerConfig, WorkerConfig])
    def test_what_resembles_nothing_is_answered_with_all_that_is_known(self, kind: type) -> None:
        with pytest.raises(ConfigError, match='unknown setting "zzz"; known: ') as error:
            build(kind, {"zzz": 1})
        assert all(name in str(error.value) for name in settings_of(kind))


class TestMissingSettings:
    @pytest.mark.parametrize(("kind", "name"), [(ServerConfig, "num_workers"), (WorkerConfig, "server_addr")])
    def test_what_has_no_default_is_asked_for_by_name(self, kind: type, name: str) -> None:
        with pytest.raises(ConfigError, match=f"^missing setting: {name}$"):
            build(kind, {"sync_every": 5})


class TestNumbers:
    @pytest.mark.parametrize("name", SERVER_WHOLE_FROM_1)
    @pytest.mark.parametrize("value", [0, -1, NAN, INF, -INF, 1.5, 2.0])
    def test_a_servers_count_is_a_whole_number_from_one_on(self, name: str, value: float) -> None:
        with pytest.raises(ConfigError, match=rf"{name} must be .*≥ 1, got {value}"):
            server(**{name: value})

    @pytest.mark.parametrize("name", WORKER_WHOLE_FROM_1)
    @pytest.mark.parametrize("value", [0, -1, NAN, INF, 1.5])
    def test_a_workers_count_is_a_whole_number_from_one_on(self, name: str, value: float) -> None:
        with pytest.raises(ConfigError, match=rf"{name} must be .*≥ 1, got {value}"):
            worker(**{name: value})

    @pytest.mark.parametrize("name", SERVER_WHOLE_FROM_0)
    @pytest.mark.parametrize("value", [-1, NAN, INF, 0.5, 1.5, 2.0])
    def test_staleness_and_port_are_whole_numbers_from_zero_on(self, name: str, value: float) -> None:
        assert getattr(server(**{name: 0}), name) == 0
        with pytest.raises(ConfigError, match=rf"{name} must be .*≥ 0, got {value}"):
            server(**{name: value})

    @pytest.mark.parametrize(
        "make_and_name", [(server, n) for n in SERVER_NUMBERS] + [(worker, n) for n in WORKER_NUMBERS]
    )
    @pytest.mark.parametrize("value", [-0.1, -1, NAN, INF, -INF])
    def test_a_time_or_a_rate_is_finite_and_not_negative_and_may_have_a_fraction(
        self, make_and_name: tuple[Any, str], value: float
    ) -> None:
        make, name = make_and_name
        needed = {"quorum": 1} if name == "grace_s" else {}
        assert values_of(make(**needed, **{name: 0.25}))[name] == 0.25
        assert values_of(make(**needed, **{name: 0}))[name] == 0
        with pytest.raises(ConfigError, match=rf"{name} must be ≥ 0, got {value}"):
            make(**{name: value})

    @pytest.mark.row("B18")
    @pytest.mark.parametrize(("name", "range_"), SERVER_RANGES.items())
    @pytest.mark.parametrize("value", [True, False, "3", "80", [3], b"3", 3j], ids=repr)
    def test_neither_truth_values_nor_text_are_numbers_to_a_server(self, name: str, range_: str, value: object) -> None:
        with pytest.raises(ConfigError, match=rf"^{name} must be {range_}, got {re.escape(repr(value))}$"):
            server(**{name: value})

    @pytest.mark.parametrize(("name", "range_"), WORKER_RANGES.items())
    @pytest.mark.parametrize("value", [True, False, "3", [3]], ids=repr)
    def test_neither_truth_values_nor_text_are_numbers_to_a_worker(self, name: str, range_: str, value: object) -> None:
        with pytest.raises(ConfigError, match=rf"^{name} must be {range_}, got {re.escape(repr(value))}$"):
            worker(**{name: value})

    @pytest.mark.parametrize(
        "make_and_name", [(server, n) for n in SERVER_RANGES] + [(worker, n) for n in WORKER_RANGES]
    )
    @pytest.mark.parametrize("value", [10**400, -(10**400), 10**5000], ids=["10**400", "-10**400", "10**5000"])
    def test_a_number_too_large_for_anything_is_refused_and_shown_in_short(
        self, make_and_name: tuple[Any, str], value: int
    ) -> None:
        make, name = make_and_name
        with pytest.raises(ConfigError, match=rf"{name} must be .*, got a number of \d+ bits, which is too large$"):
            make(**{name: value})

    @pytest.mark.parametrize("name", SERVER_OPTIONAL)
    def test_none_leaves_an_optional_setting_open(self, name: str) -> None:
        assert getattr(server(**{name: None}), name) is None

    @pytest.mark.parametrize(("name", "range_"), SERVER_REQUIRED.items())
    def test_none_is_no_value_for_the_others(self, name: str, range_: str) -> None:
        with pytest.raises(ConfigError, match=f"^{name} must be {range_}, got None$"):
            server(**{name: None})


class TestServer:
    @pytest.mark.row("B18")
    @pytest.mark.parametrize("name", ["min_workers", "quorum"])
    def test_more_than_the_number_of_workers_cannot_be_asked_for(self, name: str) -> None:
        assert getattr(server(**{name: 4}), name) == 4
        with pytest.raises(ConfigError, match=rf"{name} \(5\) must not exceed num_workers \(4\)"):
            server(**{name: 5})

    @pytest.mark.parametrize("limit", [0.5, -1.0, NAN, INF, True, "2"])
    def test_a_screen_of_norms_is_one_or_more_or_off(self, limit: object) -> None:
        with pytest.raises(ConfigError, match="norm_screen must be"):
            server(norm_screen=limit)
        assert (server(norm_screen=0).norm_screen, server(norm_screen=1.5).norm_screen) == (0, 1.5)

    @pytest.mark.parametrize("port", [65536, 10**9])
    def test_a_port_out_of_range_is_refused(self, port: int) -> None:
        with pytest.raises(ConfigError, match=f"port must be between 0 and 65535, got {port}"):
            server(port=port)

    @pytest.mark.parametrize("port", [None, 0, 1, 65535])
    def test_any_other_port_is_accepted(self, port: int | None) -> None:
        assert server(port=port).port == port

    @pytest.mark.parametrize("size", [1, 63, 65, 100, (16 << 20) + 64, 1 << 40])
    def test_a_part_size_is_a_multiple_of_64_up_to_16_mib(self, size: int) -> None:
        with pytest.raises(ConfigError, match=f"multiple of 64 between 64 and 16777216, got {size}"):
            server(part_size_bytes=size)

    @pytest.mark.parametrize("size", [0, -1, -64])
    def test_a_part_size_is_not_negative_whatever_it_is_a_multiple_of(self, size: int) -> None:
        with pytest.raises(ConfigError, match=f"^part_size_bytes must be ≥ 1, got {size}$"):
            server(part_size_bytes=size)

    def test_a_part_size_is_a_whole_number_even_when_it_would_be_the_right_one(self) -> None:
        with pytest.raises(ConfigError, match=r"^part_size_bytes must be a whole number ≥ 1, got 128\.0$"):
            server(part_size_bytes=128.0)

    @pytest.mark.parametrize("size", [64, 128, 16 << 20])
    def test_the_ends_of_that_range_are_accepted(self, size: int) -> None:
        assert server(part_size_bytes=size).part_size_bytes == size

    @pytest.mark.parametrize("strategy", ["random", "", None, 3, ["strided"]])
    def test_an_unknown_fragment_strategy_is_refused(self, strategy: object) -> None:
        message = f"fragment_strategy must be one of 'contiguous', 'strided', 'counted', got {strategy!r}"
        with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
            server(fragment_strategy=strategy)

    @pytest.mark.parametrize("weight_by", ["samples", "tokens"])
    def test_clients_that_say_no_sizes_and_weights_by_size_are_refused_together(self, weight_by: str) -> None:
        assert server(compat_port=8600).weight_by == "equal"
        message = f"weight_by must be 'equal' with compat_port, got '{weight_by}': .*leave one of the two out"
        with pytest.raises(ConfigError, match=message):
            server(compat_port=8600, weight_by=weight_by)

    def test_a_compatibility_port_is_in_range_and_its_host_goes_with_it(self) -> None:
        with pytest.raises(ConfigError, match="compat_port must be between 0 and 65535, got 65536"):
            server(compat_port=65536)
        with pytest.raises(ConfigError, match=r"compat_host \('0.0.0.0'\) needs compat_port"):
            server(compat_host="0.0.0.0")

    def test_a_certificate_and_its_key_go_together_and_not_with_plain_http(self) -> None:
        assert server(tls_cert="a.pem", tls_key="b.pem").tls_key == "b.pem"
        with pytest.raises(ConfigError, match=r"tls_cert and tls_key go together, got 'a\.pem' and None"):
            server(tls_cert="a.pem")
        with pytest.raises(ConfigError, match="insecure is plain HTTP, tls_cert is TLS"):
            server(tls_cert="a.pem", tls_key="b.pem", insecure=True)

    @pytest.mark.parametrize("make", [server, worker])
    def test_a_tokenizer_is_named_in_a_few_words(self, make: Any) -> None:
        assert make(tokenizer="sha256:12ab").wishes.tokenizer == "sha256:12ab"
        for wrong in ("", "x" * 300):
            with pytest.raises(ConfigError, match=rf"tokenizer must be 1 to 256 characters, got {len(wrong)}"):
                make(tokenizer=wrong)

    @pytest.mark.parametrize(("make", "name"), [(server, "host"), (worker, "server_addr")])
    def test_an_address_that_must_be_there_is_text(self, make: Any, name: str) -> None:
        with pytest.raises(ConfigError, match=f"{name} must be text, got None"):
            make(**{name: None})

    @pytest.mark.parametrize("advertise", ["", "a b", "host:port", "host:70000", "https://host"])
    def test_what_the_join_string_is_to_name_is_an_address(self, advertise: str) -> None:
        assert server(advertise="gpu.example.org:9000").advertise == "gpu.example.org:9000"
        with pytest.raises(ConfigError, match="server address"):
            server(advertise=advertise)

    @pytest.mark.parametrize("name", ["embeddings_apart", "deterministic", "insecure", "remote_control"])
    @pytest.mark.parametrize("value", ["no", "", 0, 1, 1.0, None, []], ids=repr)
    def test_a_switch_is_true_or_false_and_nothing_like_it(self, name: str, value: object) -> None:
        assert getattr(server(**{name: True}), name) is True
        assert getattr(server(**{name: False}), name) is False
        with pytest.raises(ConfigError, match=f"^{name} must be one of True, False, got {re.escape(repr(value))}$"):
            server(**{name: value})

    def test_the_defaults_need_only_the_number_of_workers(self) -> None:
        config = server()
        assert (config.port, config.min_workers, config.quorum) == (DEFAULT_PORT, 1, None)
        assert (config.outer_optimizer, config.outer_lr, config.outer_momentum) == ("nesterov", None, None)

    def test_it_listens_on_this_machine_only_unless_told_otherwise(self) -> None:
        assert server().host == "127.0.0.1"

    def test_what_it_leaves_open_stays_open_in_its_wishes(self) -> None:
        assert server().wishes == server(sync_every=None, codec=None, num_fragments=None).wishes
        wishes = server(sync_every=50, codec="bf16", num_fragments=2).wishes
        assert (wishes.sync_every, wishes.codec, wishes.num_fragments) == (50, "bf16", 2)
        assert (server().wishes.sync_every, server().wishes.codec, server().wishes.num_fragments) == (None, None, None)

    def test_its_rules_are_its_settings(self) -> None:
        rules = server(
            min_workers=2, quorum=3, grace_s=1.5, round_deadline_s=60.0, start_deadline_s=90.0, max_staleness=7
        ).rules
        assert (rules.num_workers, rules.min_workers, rules.quorum, rules.grace_s) == (4, 2, 3, 1.5)
        assert (rules.round_deadline_s, rules.start_deadline_s, rules.max_staleness) == (60.0, 90.0, 7)


class TestWorker:
    @pytest.mark.parametrize("anchor", ["Device", "cpu", None, 0])
    def test_the_anchor_is_on_the_device_or_the_host(self, anchor: object) -> None:
        with pytest.raises(ConfigError, match=re.escape(f"anchor must be one of 'device', 'host', got {anchor!r}")):
            worker(anchor=anchor)
        assert worker(anchor="host").anchor == "host"

    @pytest.mark.parametrize("on_exit", ["Global", "", None, 1, ["global"]])
    def test_what_the_model_holds_at_the_end_is_global_or_local(self, on_exit: object) -> None:
        message = f"on_exit must be one of 'global', 'local', got {on_exit!r}"
        with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
            worker(on_exit=on_exit)

    @pytest.mark.parametrize("on_exit", ["global", "local"])
    def test_both_of_these_are_accepted(self, on_exit: str) -> None:
        assert worker(on_exit=on_exit).on_exit == on_exit

    @pytest.mark.parametrize(("bf16_comm", "codec"), [(None, None), (True, "bf16"), (False, "fp32")])
    def test_bf16_comm_is_a_wish_for_a_codec(self, bf16_comm: bool | None, codec: str | None) -> None:
        assert worker(bf16_comm=bf16_comm).wishes.codec == codec

    @pytest.mark.parametrize("bf16_comm", ["no", "", 0, 1, 1.0, []], ids=repr)
    def test_bf16_comm_is_true_false_or_open_and_nothing_like_it(self, bf16_comm: object) -> None:
        message = f"bf16_comm must be one of True, False, None, got {bf16_comm!r}"
        with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
            worker(bf16_comm=bf16_comm)

    @pytest.mark.parametrize("worker_id", [None, "w", "_", "0", "host-1.lan:4711", "w" * 128])
    def test_a_worker_id_that_fits_the_protocol_is_accepted(self, worker_id: str | None) -> None:
        assert worker(worker_id=worker_id).worker_id == worker_id

    @pytest.mark.parametrize(
        "worker_id", ["", "w" * 129, "-w", ".w", ":w", "a b", "a/b", "w\n", "wörker", "w\0", 5, b"w", ["w"]], ids=repr
    )
    def test_a_worker_id_that_does_not_is_refused_before_the_server_sees_it(self, worker_id: object) -> None:
        with pytest.raises(ConfigError, match=r"^worker_id must be 1 to 128 letters, digits, .* beginning with") as e:
            worker(worker_id=worker_id)
        assert str(e.value).endswith(f"got {worker_id!r}")

    @pytest.mark.parametrize("peers", ["", " "])
    def test_an_empty_join_does_not_found_another_run(self, peers: str) -> None:
        with pytest.raises(ConfigError, match=r"^peers \(--join\) is empty: .* leave it out to found a run"):
            worker(server_addr="gossip", peers=peers)

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("outer_lr", 0.5),
            ("outer_momentum", 0.0),
            ("nesterov", False),
            ("outer_optimizer", "my:Rule"),
            ("weight_by", "tokens"),
        ],
    )
    def test_what_a_server_decides_a_worker_says_only_without_one(self, name: str, value: object) -> None:
        assert getattr(worker(topology="allreduce", server_addr=None, **{name: value}).serverless, name) == value
        with pytest.raises(ConfigError, match=rf"{name} \({value!r}\) needs topology .*it is the server's to say"):
            worker(server_addr="allreduce:8512", **{name: value})

    def test_an_optimizer_by_name_has_its_options_and_steps_along_what_all_agree_on(self) -> None:
        made = worker(server_addr="gossip", outer_optimizer="my:Rule", outer_options="lr=1 mass=2,3 slow=true how=so")
        assert outer_arguments(made.serverless) == {"lr": 1, "mass": (2, 3), "slow": True, "how": "so"}
        assert worker(server_addr="gossip", outer_optimizer=ServerConfig).serverless.outer_optimizer == (
            "outerstep.config.server:ServerConfig"
        )
        with pytest.raises(ConfigError, match=r"outer_options \('lr=1'\) needs an outer_optimizer by name"):
            worker(server_addr="gossip", outer_options="lr=1")
        for pattern in ("pairs", "exponential"):
            with pytest.raises(ConfigError, match=f"'my:Rule' steps along what .*, and with pattern='{pattern}'"):
                worker(server_addr="gossip", outer_optimizer="my:Rule", pattern=pattern)
        assert worker(server_addr="gossip", outer_optimizer="nesterov", pattern="pairs")

    @pytest.mark.parametrize(
        ("retries", "patience_s"), [(None, 30.0), (0, 0.0), (1, 2.0), (3, 14.0), (10**9, 2.0**21 - 2)]
    )
    def test_retries_are_another_word_for_patience(self, retries: int | None, patience_s: float) -> None:
        """2, 4, 8 seconds apart, and then the worker trains on."""
        assert worker(max_sync_retries=retries).server.patience_s == patience_s

    def test_a_codec_is_a_wish_and_bf16_comm_is_short_for_one(self) -> None:
        wishes = WorkerConfig(server_addr="h:1", codec="int8", down_codec="bf16").wishes
        assert (wishes.codec, wishes.down_codec) == ("int8", "bf16")
        with pytest.raises(ConfigError, match="bf16_comm is short for codec, got both"):
            WorkerConfig(server_addr="h:1", codec="int8", bf16_comm=True)

    def test_without_a_server_nobody_has_steps_of_its_own(self) -> None:
        with pytest.raises(
            ConfigError,
            match=r"dylu \(True\) needs topology server, and has no effect here: add that, or leave dylu out",
        ):
            worker(server_addr="allreduce", dylu=True)

    def test_it_follows_the_plan_unless_told_otherwise(self) -> None:
        wishes = worker().wishes
        assert (wishes.sync_every, wishes.codec, wishes.num_fragments) == (None, None, None)
        assert worker(sync_every=7, num_fragments=3).wishes.sync_every == 7
        assert worker(sync_every=7, num_fragments=3).wishes.num_fragments == 3


@pytest.mark.parametrize("config", [server(), worker()], ids=["server", "worker"])
def test_a_config_cannot_be_changed_behind_its_checks(config: ServerConfig | WorkerConfig) -> None:
    with pytest.raises(FrozenInstanceError):
        config.sync_every = 0  # type: ignore[misc]

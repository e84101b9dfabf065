"""Orders on their way to workers."""

from outerstep.coordination.server.commands import Commands


def kinds(commands: Commands, worker: str = "a") -> list[str]:
    return [command.kind for command in commands.pending(worker)]


def test_an_order_is_pending_until_it_is_acknowledged() -> None:
    commands = Commands()
    commands.issue("a", "drain", "maintenance")
    (order,) = commands.pending("a")
    assert (order.kind, order.reason) == ("drain", "maintenance")
    assert commands.pending("a") == (order,)
    commands.acknowledge("a", [order.id])
    assert commands.pending("a") == ()


def test_the_same_order_twice_is_one_order_while_it_is_pending() -> None:
    commands = Commands()
    commands.issue("a", "sync", "once")
    (first,) = commands.pending("a")
    commands.issue("a", "sync", "again")
    assert commands.pending("a") == (first,)
    commands.acknowledge("a", [first.id])
    commands.issue("a", "sync", "later")
    (second,) = commands.pending("a")
    assert second.id > first.id


def test_orders_come_in_the_order_they_were_given() -> None:
    commands = Commands()
    commands.issue("a", "sync", "")
    commands.issue("a", "drain", "")
    assert kinds(commands) == ["sync", "drain"]


def test_every_worker_has_its_own() -> None:
    commands = Commands()
    commands.issue("a", "drain", "")
    commands.issue("b", "drain", "")
    ids = {command.id for worker in "ab" for command in commands.pending(worker)}
    assert len(ids) == 2
    commands.acknowledge("a", ids)  # nobody acknowledges for somebody else
    assert (kinds(commands, "a"), kinds(commands, "b")) == ([], ["drain"])
    assert kinds(commands, "c") == []


def test_who_is_gone_has_nothing_to_obey() -> None:
    commands = Commands()
    commands.issue("a", "drain", "")
    commands.forget("a")
    commands.forget("a")
    assert kinds(commands) == []


def test_acknowledging_what_was_never_ordered_changes_nothing() -> None:
    commands = Commands()
    commands.acknowledge("a", [1, 2])
    commands.issue("a", "drain", "")
    commands.acknowledge("a", [999])
    assert kinds(commands) == ["drain"]

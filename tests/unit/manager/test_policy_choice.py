# SPDX-License-Identifier: Apache-2.0
"""`eviction_policy`: a user's own policy is accepted, and an invalid one refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from vllm_nvmeof_offload.cli import app
from vllm_nvmeof_offload.errors import ConfigError
from vllm_nvmeof_offload.manager.eviction import POLICIES, choose_policy

EXAMPLES = Path(__file__).parents[3] / "examples"
MODULE = """
from tests.lru_policy import LruPolicy

class Good(LruPolicy):
    pass

class Forgetful(LruPolicy):
    def withdraw(self, slot):
        pass

class Inventive(LruPolicy):
    def victim(self):
        return None if super().victim() is None else 0

class Generous(LruPolicy):
    def victim(self):
        return 0

class Raising(LruPolicy):
    def admit(self, slot):
        raise KeyError(slot)

class Dividing(LruPolicy):
    def __init__(self, used):
        super().__init__(used)
        self.share = 100 // len(used)

class Listed(LruPolicy):
    def __init__(self, used):
        super().__init__(used)
        used.tobytes, used.tolist, used.append

class Empty:
    pass

Number = 3
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "policies_of_a_user.py").write_text(MODULE)
    (tmp_path / "broken_of_a_user.py").write_text("import no_such_module_anywhere")
    (tmp_path / "folder_of_a_user").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.syspath_prepend(str(EXAMPLES))


def checked(name: str) -> Result:
    """What `config check` says of the policy."""
    return CliRunner().invoke(app, ["config", "check", json.dumps({"eviction_policy": name})])


def test_our_policies_and_a_users_own_are_accepted() -> None:
    assert choose_policy("lru") is None, "the native one"
    make = choose_policy("policies_of_a_user:Good")
    assert make is not None
    made = make(range(4))
    made.admit(2)
    assert made.victim() == 2


@pytest.mark.parametrize(
    "name", [*POLICIES, "04_custom_policy:SecondChance", "policies_of_a_user:Dividing"]
)
def test_every_policy_passes_the_trial(name: str) -> None:
    """It may count on having slots, as a policy of the manager has."""
    assert checked(name).exit_code == 0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no-such", 'no such policy; give .*"lru" or "module:Class"'),
        ("policies_of_a_user:", "no such policy"),
        ("nowhere_at_all:Policy", "nowhere_at_all cannot be imported.*PYTHONPATH"),
        ("broken_of_a_user:Policy", "broken_of_a_user cannot be imported.*no_such_module"),
        ("policies_of_a_user:Missing", "policies_of_a_user.py, has no Missing"),
        ("folder_of_a_user:Good", "folder_of_a_user, has no Good"),
        ("policies_of_a_user:Empty", "has no admit, withdraw, touch, peek, victim;"),
        ("policies_of_a_user:Number", "has no admit"),
    ],
)
def test_what_is_no_policy_is_refused_by_name(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        choose_policy(name)
    assert str(caught.value).startswith(f"eviction_policy='{name}': ")
    assert checked(name).stderr == f"vllm-nvmeof: {caught.value}\n"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Generous", "a slot that is not evictable"),
        ("Listed", "AttributeError"),  # a server gives it a view, and not an array
        ("Forgetful", "a slot that is not evictable"),
        ("Inventive", "a slot that is not evictable"),
        ("Raising", "KeyError"),
    ],
)
def test_a_policy_that_does_not_work_fails_the_trial(name: str, message: str) -> None:
    result = checked(f"policies_of_a_user:{name}")
    assert result.exit_code == 2
    assert message in result.stderr
    assert f"eviction_policy='policies_of_a_user:{name}': not an eviction" in result.stderr

# SPDX-License-Identifier: Apache-2.0
"""`eviction_policy`: a user's own policy is accepted, and an invalid one refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_nvmeof_offload.errors import ConfigError
from vllm_nvmeof_offload.manager.eviction import POLICIES, LruPolicy, choose_policy, try_policy

EXAMPLES = Path(__file__).parents[2] / "examples"
MODULE = """
from vllm_nvmeof_offload.manager.eviction import LruPolicy

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


def test_our_policies_and_a_users_own_are_accepted() -> None:
    assert choose_policy("lru") is LruPolicy
    made = choose_policy("policies_of_a_user:Good")(range(4))
    made.admit(2)
    assert made.victim() == 2


def test_the_trial_gives_a_policy_slots_as_the_manager_does() -> None:
    """It may count on having some, but not on `used` being an array: it is a view."""
    assert choose_policy("policies_of_a_user:Dividing")(range(4)).share == 25  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", [*POLICIES, "04_custom_policy:SecondChance"])
def test_every_policy_passes_the_trial(name: str) -> None:
    assert try_policy(choose_policy(name)) is None


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no-such", 'no such policy; give .*"lru" or "module:Class"'),
        ("policies_of_a_user:", "no such policy"),
        ("nowhere_at_all:Policy", "nowhere_at_all cannot be imported.*PYTHONPATH"),
        ("broken_of_a_user:Policy", "broken_of_a_user cannot be imported.*no_such_module"),
        ("policies_of_a_user:Missing", "policies_of_a_user.py, has no Missing"),
        ("folder_of_a_user:Good", "folder_of_a_user, has no Good"),
        ("policies_of_a_user:Generous", "a slot where none is evictable"),
        ("policies_of_a_user:Listed", "raises AttributeError"),
        ("policies_of_a_user:Empty", "has no admit, withdraw, touch, peek, victim, __contains__"),
        ("policies_of_a_user:Number", "has no admit"),
        ("policies_of_a_user:Forgetful", "does not know which slots are evictable"),
        ("policies_of_a_user:Inventive", "peek gave .*, victim gave 0"),
        ("policies_of_a_user:Raising", "it raises KeyError"),
    ],
)
def test_an_invalid_policy_is_refused_by_name(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        choose_policy(name)
    assert str(caught.value).startswith(f"eviction_policy='{name}': ")

"""How the page begins where the statistics of the heads take long: at once, and it goes to the telling head later."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.atlases import atlas_of, random_matrix
from tests.browser.conftest import READY, served, state, until

import attlas
from attlas.recording.atlas import Atlas

pytestmark = pytest.mark.browser

N = 60


@pytest.fixture(scope="module")
def atlas() -> Atlas:
    """Two layers, of which head 1·1 looks at the token before."""
    codes = torch.eye(16)[torch.arange(N) % 16][None, None].expand(1, 2, N, 16).clone()
    queries = 30 * codes.roll(1, 2)
    queries[:, 0] = 20 * torch.randn(N, 16, generator=torch.Generator().manual_seed(1))  # the other head has no pattern
    second = attlas.attend(queries, codes, mask=attlas.Causal())
    return atlas_of(
        random_matrix(N, spread=2.0), second, ids=torch.arange(N)[None] % 30, tokens=[f" w{i}" for i in range(N)]
    )


@pytest.fixture(scope="module")
def address(atlas: Atlas) -> Iterator[str]:
    with served(atlas) as url:
        yield url


class Held:
    """Answers of one question that are held back until they are let go."""

    def __init__(self) -> None:
        self.waiting: list[Any] | None = []

    def __call__(self, route: Any) -> None:
        if self.waiting is None:
            route.continue_()
        else:
            self.waiting.append(route)

    def let_go(self) -> None:
        waiting, self.waiting = self.waiting or [], None
        for route in waiting:
            route.continue_()


@pytest.fixture
def begin(browse: Any, address: str) -> Callable[..., tuple[Any, Held]]:
    """Open a page whose question about the heads is held back."""

    def opened(hash_: str = "") -> tuple[Any, Held]:
        held = Held()
        page = browse(f"{address}{hash_}", routes={"**/api/heads*": held})
        assert page.locator(".says b").inner_text().startswith("Layer ")
        return page, held

    return opened


def shown(page: Any) -> tuple[str, str]:
    return page.locator(".pick-layer").input_value(), page.locator(".pick-head").input_value()


def knows_the_heads(page: Any) -> None:
    until(page, "[...document.querySelectorAll('.thumb-kind')].every((kind) => kind.textContent)")


def test_the_page_waits_for_no_statistic_and_goes_to_the_telling_head_later(begin: Any) -> None:
    page, held = begin()
    assert shown(page) == ("0", "0")
    assert page.locator(".says b").inner_text() == "Layer 0, head 0"
    held.let_go()
    until(page, "document.querySelector('.says b').textContent === 'Layer 1, head 1 looks at the token before'")
    assert shown(page) == ("1", "1")
    page.wait_for_selector(READY)
    assert state(page)["h"] == "1"


@pytest.mark.parametrize("act", ["zoom", "head", "pin", "key"])
def test_the_page_stays_where_the_user_has_moved_to(begin: Any, act: str) -> None:
    page, held = begin()
    stage = page.locator(".stage")
    if act == "zoom":
        stage.hover()
        page.mouse.wheel(0, -300)
    elif act == "head":
        page.locator(".pick-head").select_option("1")
    elif act == "pin":
        stage.click()
    else:
        page.keyboard.press("+")
    before = shown(page)
    held.let_go()
    knows_the_heads(page)
    page.wait_for_timeout(150)
    assert shown(page) == before == ("0", "1" if act == "head" else "0")


def test_a_link_says_where_to_begin_and_the_page_stays_there(begin: Any) -> None:
    page, held = begin("#e=0&h=1")
    held.let_go()
    knows_the_heads(page)
    page.wait_for_timeout(150)
    assert shown(page) == ("0", "1")

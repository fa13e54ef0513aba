"""The scripted player of text games, in a game of three commands."""

from random import Random

from benchmarks.learning.imitation import Player, changed, told

TASK = "Your task is to move the plum to the blue box."
EPISODE = """[SUCCESS, 2027-01-01, own run]
  earlier run: Task: Your task is to move the plum to the red box.
  earlier run: 1. agent: pick_up what="ripe plum" → You have it.
  earlier run: 2. agent: move what="plum to red box" → You move it.
Ended: completed; outcome SUCCESS (-)"""


class Kitchen:
    """A game that is won by two commands, and lost by a focus on anything."""

    def __init__(self) -> None:
        self.task = TASK
        self.done: list[str] = []

    @property
    def over(self) -> bool:
        return "move plum to blue box" in self.done or any("focus" in each for each in self.done)

    def act(self, command: str) -> tuple[str, bool]:
        understood = command in self.possible()
        if understood:
            self.done.append(command)
        return ("Done." if understood else "No known action matches that input."), understood

    def possible(self) -> list[str]:
        return ["pick up plum", "pick up knife", "move plum to blue box", "focus on knife", "wait"]


def played(*texts: str) -> tuple[Kitchen, Player]:
    game = Kitchen()
    player = Player(game, texts, Random(1), limit=10)
    player.play()
    return game, player


def test_player_repeats_an_episode_in_the_words_of_its_own_task() -> None:
    assert changed("move it to the red box", "move it to the blue box") == {"red": "blue"}
    assert [*told([EPISODE], TASK)] == ["pick up ripe plum", "move plum to blue box"]
    game, player = played(EPISODE)
    # the game does not know the first command as it stands, but one that is like it
    assert game.done == ["pick up plum", "move plum to blue box"]
    assert [call.failed for call in player.calls] == [True, False, False]


def test_player_repeats_no_failed_episode() -> None:
    assert [*told([EPISODE.replace("[SUCCESS", "[FAILURE")], TASK)] == []


def test_guess_is_never_a_focus_that_the_task_does_not_name() -> None:
    for seed in range(20):
        game = Kitchen()
        Player(game, (), Random(seed), limit=10).play()
        assert not any("focus" in each for each in game.done)

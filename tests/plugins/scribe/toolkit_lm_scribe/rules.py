"""Prompt rules of Scribe."""

from toolkit_lm_encdec.rules import UsualRules


class ScribeRules(UsualRules):
    """The decoder begins with the start token, and the task that config.json names."""

    def default_decoder_prompt(self) -> list[int]:
        return [self.start_token_id, self.generation["task_token_id"]]

"""The judge that ships: it was trained on the very tokens that it is asked with."""

from jinja2 import Environment
from millrace.judging.question import judging_question

from models.training.judge_documents import Answered, judged
from models.training.tokenizer import BOS, CHAT_TEMPLATE, EOS, build_tokenizer

PROMPT = "<|bos|><|user|>Count from 1 to 4.<|eos|><|assistant|>"


def _asked(answer: str) -> list[int]:
    """Tokens of the judge service's question, by the chat template."""
    messages = [{"role": "user", "content": judging_question(PROMPT, answer)}]
    template = Environment().from_string(CHAT_TEMPLATE)
    text = template.render(messages=messages, bos_token=BOS, eos_token=EOS, tools=None, add_generation_prompt=True)
    return list(build_tokenizer().encode(text, add_special_tokens=False).ids)


def test_a_document_of_training_is_the_question_that_is_asked() -> None:
    for answer in ("1 2 3 4", "cat", "", "1\n2"):
        row = Answered(PROMPT, answer, right=True, expected="1 2 3 4")
        assert judged(build_tokenizer(), row).tokens == _asked(answer)


def test_an_answer_is_right_up_to_its_first_wrong_token() -> None:
    document = judged(build_tokenizer(), Answered(PROMPT, "1 2 4 4", right=False, expected="1 2 3 4"))
    assert [value for value in document.so_far if value >= 0] == [1, 1, 1, 1, 0, 0, 0]
    assert not document.right
    open_ended = judged(build_tokenizer(), Answered(PROMPT, "1 2", right=True, expected=""))
    assert set(open_ended.so_far) == {-1}

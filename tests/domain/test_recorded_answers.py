"""A model's answer in the log: it reads back as it was, and nothing changes it later."""

from hypothesis import given
from hypothesis import strategies as st

from bottega.agents.messages import AssistantMessage, ToolCall, Usage
from bottega.engine.replay import answer_of, data_of
from bottega.events.data import ModelMessage, StoredLlmCompletedData

JSON = st.dictionaries(
    st.text(max_size=3), st.integers() | st.lists(st.text(max_size=3), max_size=2), max_size=2
)
CALLS = st.builds(
    ToolCall,
    id=st.text(max_size=3),
    name=st.text(max_size=3),
    arguments=JSON,
    malformed=st.none() | st.text(max_size=3),
)
ANSWERS = st.builds(
    AssistantMessage,
    content=st.text(max_size=5),
    metadata=JSON,
    tool_calls=st.lists(CALLS, max_size=3).map(tuple),
)


def recorded(data: ModelMessage) -> AssistantMessage:
    usage = Usage(input=3).to_dict()
    return answer_of(StoredLlmCompletedData(call=1, attempt=1, message=data, usage=usage))


@given(ANSWERS)
def test_any_answer_reads_back_as_it_was(message: AssistantMessage) -> None:
    same = {"timestamp": message.timestamp, "usage": message.usage}
    assert recorded(data_of(message)).model_copy(update=same) == message
    left_out = {"usage", "timestamp", "state"}
    assert data_of(message) == message.model_dump(
        mode="json", exclude_defaults=True, exclude=left_out
    )


def test_a_tool_that_changes_its_arguments_does_not_change_the_record() -> None:
    call = ToolCall(id="a", name="sort", arguments={"items": [2, 1]})
    data = data_of(AssistantMessage(tool_calls=(call,)))
    call.arguments["items"].sort()
    assert recorded(data).tool_calls[0].arguments == {"items": [2, 1]}

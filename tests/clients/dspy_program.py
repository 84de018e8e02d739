"""The package dspy: its modules write their own form into the prompt, as text."""

import dspy

import play
from play import ASK


def lm_of(base_url, api_key, model):
    # page
    lm = dspy.LM(f"openai/{model}", api_base=base_url, api_key=api_key, cache=False)
    # /page
    return lm


def answered(feature, program):
    def played(*where):
        lm, question = lm_of(*where), ASK[feature]
        # page
        with dspy.context(lm=lm):
            prediction = program(question=question)
        # /page
        return [str(value) for value in prediction.values()]

    return played


def turns(*where):
    program, history = dspy.Predict("question, history: dspy.History -> answer"), []
    with dspy.context(lm=lm_of(*where)):
        for question in (ASK["turns"], play.AGAIN):
            prediction = program(question=question, history=dspy.History(messages=history))
            history.append({"question": question, "answer": prediction.answer})
    return [one["answer"] for one in history]


play.play(
    {
        "chat": answered("chat", dspy.Predict("question -> answer")),
        "tools": answered("tools", dspy.ReAct("question -> answer", tools=[play.add])),
        "structured": answered("structured", dspy.Predict("question -> sum: int")),
        "reasoning": answered("reasoning", dspy.ChainOfThought("question -> answer")),
        "turns": turns,
    }
)

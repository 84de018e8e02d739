"""The package dspy: its modules write their own form into the prompt, as text."""

import dspy
import play
from play import ASK


def lm_of(base_url, api_key, model):
    # page
    lm = dspy.LM(f"openai/{model}", api_base=base_url, api_key=api_key, cache=False)
    # /page
    return lm


def said(lm):
    return [str(output) for call in lm.history for output in call["outputs"]]


def answered(feature, program):
    def played(*where):
        lm, question = lm_of(*where), ASK[feature]
        # page
        with dspy.context(lm=lm):
            prediction = program(question=question)
        # /page
        assert prediction.values()
        return said(lm)

    return played


def turns(*where):
    program, history, lm = dspy.Predict("question, history: dspy.History -> answer"), [], lm_of(*where)
    with dspy.context(lm=lm):
        for question in (ASK["turns"], play.AGAIN):
            prediction = program(question=question, history=dspy.History(messages=history))
            history.append({"question": question, "answer": prediction.answer})
    return said(lm)


play.play(
    {
        "chat": answered("chat", dspy.Predict("question -> answer")),
        "tools": answered("tools", dspy.ReAct("question -> answer", tools=[play.add])),
        "structured": answered("structured", dspy.Predict("question -> sum: int")),
        "reasoning": answered("reasoning", dspy.ChainOfThought("question -> answer")),
        "turns": turns,
    }
)

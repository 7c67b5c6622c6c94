"""lm-evaluation-harness (pip install lm-eval): lm_eval.simple_evaluate(model=BonsaiLM(), tasks=[...])."""

from lm_eval.api.model import LM

import bonsai_jax as bj

model, greedy = bj.load("synth:tiny-llama:q8_0"), bj.SamplingParams(temperature=0.0)
encode, start = model.tokenizer.encode, [model.tokenizer.bos_id or model.tokenizer.eos_id]


class BonsaiLM(LM):
    def loglikelihood(self, requests):  # equal contexts are read once
        contexts, ends = zip(*((r.args[0] or start, [r.args[1]]) for r in requests), strict=True)
        return [(score.logprob, score.is_greedy) for (score,) in bj.score(model, contexts, ends)]

    def loglikelihood_rolling(self, requests):
        return [self.rolling([*start, *encode(r.args[0], add_special=False)]) for r in requests]

    def rolling(self, ids, most=model.run.context):  # each token once, after as many others as fit
        cuts = [(at, min(at + most - 1, len(ids))) for at in range(1, len(ids), most - 1)]
        prompts = [ids[max(0, end - most) : at] for at, end in cuts]
        scores = bj.score(model, prompts, [[ids[at:end]] for at, end in cuts])
        return sum(score.logprob for (score,) in scores)

    def generate_until(self, requests):
        return [self.write(r.args[0], **r.args[1]) for r in requests]

    def write(self, prompt, until=(), max_gen_toks=256, **_):
        (output,) = bj.generate(model, prompt, sampling=greedy, stop=until, max_new_tokens=max_gen_toks)
        return output.text

"""Which layers and heads of a model rank tokens best: `vtoken calibrate MODEL`, and the profile.

    prompts         needles in prose, and which tokens must survive
    observe         one forward pass of the model, a look at every layer's attention
    layer_signals   the signals of a layer
    ranking         how well signals rank needles; the choice of layers and heads
    measure         all of it: a model's profile
    model_files     the fingerprint of a model's weights
    store           profiles as files
    command         the command line

What the engine does with a profile: `vtoken.runtime.scoring`.
"""

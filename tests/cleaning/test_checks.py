from sklearn.utils.estimator_checks import parametrize_with_checks
import bilevel
@parametrize_with_checks([bilevel.LabelCleaner()])
def test_scikit_learn(estimator, check):
    check(estimator)

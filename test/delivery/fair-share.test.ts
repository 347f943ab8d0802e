// How a lane's connections are divided among workers: never more than there are, nobody left out who could have one, and
// the same answer for whoever asks.
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { shareOut, type ShareClaim } from '../../src/delivery/fair-share.ts';

const test = suite('fair share');
const claim = (epoch: string, held: number, wanted: number): ShareClaim => ({
  epoch,
  held,
  wanted,
});
const parts = (limit: number, workers: number, ...claims: ShareClaim[]): readonly number[] => {
  const shared = shareOut(limit, claims, workers);
  return claims.map(({ epoch }) => shared.get(epoch)!);
};

test('who is alone gets everything, whatever it wants', () => {
  assert.equal(parts(10, 1, claim('a', 0, 1)), [10]);
  assert.equal(parts(10, 1, claim('a', 10, 0)), [10]);
  assert.equal(parts(10, 1, claim('a', 0, 50)), [10]);
});

test('two that want more than there is share evenly; who holds more keeps the odd one', () => {
  assert.equal(parts(10, 2, claim('a', 10, 10), claim('b', 0, 10)), [5, 5]);
  assert.equal(parts(5, 2, claim('a', 2, 5), claim('b', 3, 5)), [2, 3]);
});

test('who wants little gets it, the other what is left', () => {
  assert.equal(parts(10, 2, claim('a', 0, 2), claim('b', 10, 30)), [2, 8]);
});

test('what nobody wants stays for those that have not come yet', () => {
  assert.equal(parts(10, 2, claim('a', 0, 2)), [6]);
  assert.equal(parts(10, 2, claim('a', 0, 10)), [10]);
});

test('fewer places than workers: those that hold one and need it keep it', () => {
  assert.equal(parts(1, 3, claim('a', 0, 3), claim('b', 1, 1), claim('c', 0, 9)), [0, 1, 0]);
  assert.equal(parts(1, 3, claim('a', 0, 3), claim('b', 1, 0), claim('c', 0, 0)), [1, 0, 0]);
  assert.equal(parts(2, 3, claim('a', 0, 3), claim('b', 0, 3), claim('c', 0, 3)), [1, 1, 0]);
});

test('whatever is claimed: within the limit, all of it where it is wanted, the modest first', () => {
  let state = 7;
  const roll = (below: number): number => {
    state = (Math.imul(state, 1_664_525) + 1_013_904_223) >>> 0;
    return Math.floor((state / 2 ** 32) * below);
  };
  for (let round = 0; round < 20_000; round++) {
    const limit = roll(12);
    const claims = Array.from({ length: 1 + roll(5) }, (_, at) =>
      claim(`${roll(1_000)}-${at}`, roll(12), roll(12)),
    );
    const workers = 1 + roll(6);
    const shared = shareOut(limit, claims, workers);
    const label = JSON.stringify({ limit, workers, claims, shared: [...shared] });
    const got = claims.map(({ epoch }) => shared.get(epoch) ?? -1);
    const total = got.reduce((sum, one) => sum + one, 0);
    const wanted = claims.reduce((sum, one) => sum + one.wanted, 0);
    assert.ok(total <= limit, label);
    assert.ok(total >= Math.min(limit, wanted), label);
    const hungry = claims.flatMap((one, at) => (one.wanted > got[at]! ? [got[at]!] : []));
    const least = Math.min(...hungry);
    assert.ok(hungry.length === 0 || got.every((one) => one <= least + 1), label);
    assert.equal(shareOut(limit, claims.toReversed(), workers), shared, label);
  }
});

test.run();

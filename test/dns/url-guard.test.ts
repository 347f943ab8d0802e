// What a URL must look like to be fetched at all. What it resolves to is judged elsewhere (test/sending/fetch.test.ts).
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { readUrl, URL_CHARS_MAX, urlProblem } from '../../src/dns/url-guard.ts';

const test = suite('url-guard');

for (const [text, host, port] of [
  ['http://files.example/a', 'files.example', 80],
  ['https://files.example/a?b=c#d', 'files.example', 443],
  ['HTTPS://Files.EXAMPLE:443', 'files.example', 443],
  ['http://files.example:8080/%20', 'files.example', 8080],
  ['http://files.example:443/', 'files.example', 443],
  ['https://bücher.example/ä', 'xn--bcher-kva.example', 443],
  ['https://BÜCHER.example/', 'xn--bcher-kva.example', 443],
  ['https://xn--bcher-kva.example/', 'xn--bcher-kva.example', 443],
  ['http://under_score.example/', 'under_score.example', 80],
  // Fit to be read; whether they may be dialled is the address guard's business.
  ['http://127.0.0.1:3000/', '127.0.0.1', 3000],
  ['http://[2001:DB8::0:1]/', '2001:db8::1', 80],
] as const) {
  test(`${text} leads to ${host}`, () => {
    const read = readUrl(text);
    assert.ok(read.ok, JSON.stringify(read));
    assert.is(read.ok && read.target.host, host);
    assert.is(read.ok && read.target.port, port);
    assert.is(urlProblem(text), null);
  });
}

for (const [text, problem] of [
  ['', /begin with/],
  ['files.example/a', /begin with/],
  ['ftp://files.example/', /begin with/],
  ['http:/files.example/', /begin with/],
  ['http://', /name a host/],
  ['http:///a', /name a host/],
  ['http://:80/', /name a host/],
  [' http://files.example/', /spaces/],
  ['http://files.example/a\tb', /spaces/],
  ['http://files.example/\ud800', /spaces/],
  ['http://files.example\\a', /backslash/],
  ['http://user@files.example/', /user name/],
  ['http://@files.example/', /user name/],
  ['http://127.1/', /plain form/],
  ['http://0x7f000001/', /plain form/],
  ['http://2130706433/', /plain form/],
  ['http://127.0.0.1./', /plain form/],
  ['http://１２７.0.0.1/', /plain form/],
  ['http://[fe80::1%25eth0]/', /valid URL/],
  ['http://256.256.256.256/', /valid URL/],
  ['http://files.example:99999/', /valid URL/],
  ['http://ⓛocalhost/', /plainly/],
  ['http://%6cocalhost/', /plainly/],
  ['http://files。example/', /plainly/],
  ['http://files.example./', /final dot/],
  ['http://files..example/', /valid host/],
  ['http://-a.example/', /valid host/],
  ['http://localhost/', /this machine/],
  ['http://a.LocalHost/', /this machine/],
  ['http://files.example:25/', /port 25/],
  ['http://files.example:6000/', /port 6000/],
  ['http://files.example:0/', /port 0/],
  [`http://files.example/${'a'.repeat(URL_CHARS_MAX)}`, /at most/],
] as const) {
  test(`${JSON.stringify(text.slice(0, 50))} is refused`, () => {
    const found = urlProblem(text) ?? '';
    assert.match(found, problem);
    assert.match(found, /^must /);
  });
}

test.run();

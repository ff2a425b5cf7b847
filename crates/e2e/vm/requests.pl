# Sends netlink requests of a guest: perl requests.pl KIND COUNT TOGETHER. Prints how many went well, how many were
# refused, and why the first one was.
use strict;
my ($make, $count, $together) = @ARGV;
sub attr { my ($k, $b) = @_; pack("SS", 4 + length $b, $k) . $b . "\0" x (-length($b) % 4) }
# All of them are in group 7. Names begin with a letter of their own, so that no call meets what another made.
my $link = sub { my ($letter) = @_; sub { (0, 16, 0x605, pack("CxSiII", 0, 0, 0, 0, 0) . attr(3, "$letter$_[0]\0") . attr(27, pack("I", 7)) . attr(18, attr(1, "dummy\0"))) } };
my %make = (
    link => $link->("l" . ($$ % 10000) . "_"),
    # `ip link set group 7 up` and down.
    group => sub { (0, 16, 0x5, pack("CxSiII", 0, 0, 0, $_[0] % 2, 1) . attr(27, pack("I", 7))) },
    neighbour => sub { (0, 28, 0x605, pack("CCSiSCC", 2, 0, 0, 1, 0x80, 0, 0) . attr(1, pack("N", 0x0c000000 + $_[0])) . attr(2, "\0" x 6)) },
    route => sub { (0, 24, 0x605, pack("CCCCCCCCI", 2, 32, 0, 0, 254, 3, 253, 1, 0) . attr(1, pack("N", 0x0b000000 + $_[0])) . attr(4, pack("I", 1))) },
    tracked => sub {
        my $nest = sub { attr($_[0] | 0x8000, $_[1]) };
        my ($src, $dst) = (pack("N", 0x0a000000 + $_[0]), pack("N", 0x0b000001));
        my $tuple = sub { my ($k, $s, $d) = @_; $nest->($k, $nest->(1, attr(1, $s) . attr(2, $d)) . $nest->(2, attr(1, "\x11") . attr(2, pack("n", 1000)) . attr(3, pack("n", 2000)))) };
        (12, 0x100, 0x605, pack("CCn", 2, 0, 0) . $tuple->(1, $src, $dst) . $tuple->(2, $dst, $src) . attr(7, pack("N", 3600)))
    },
);
$make = $make{$make} or die;
my $protocol = ($make->(0))[0];
socket(my $s, 16, 3, $protocol) or die "socket: $!";
my ($done, $refused, $why) = (0, 0, "none");
for (my $first = 0; $first < $count; $first += $together) {
    my $all = "";
    for my $i ($first .. $first + $together - 1) {
        my (undef, $kind, $flags, $body) = $make->($i);
        $body .= "\0" x (-length($body) % 4);
        $all .= pack("ISSII", 16 + length $body, $kind, $flags, $i, 0) . $body;
    }
    if (!defined send($s, $all, 0)) { $refused += $together; $why = "$!" if $why eq "none"; next }
    my $left = $together;
    while ($left) {
        defined recv($s, my $answer, 65536, 0) or die "recv: $!";
        while (length $answer) {
            my ($length) = unpack "I", $answer;
            my $error = unpack "x16 i", $answer;
            if ($error) { $refused++; $! = -$error; $why = "$!" if $why eq "none" } else { $done++ }
            $left--;
            substr($answer, 0, ($length + 3) & ~3) = "";
        }
    }
}
print "$done $refused $why\n";

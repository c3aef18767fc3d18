/* The token has become a cookie: on to the page, whose address takes the place of the one that had it. */

location.replace(`/${location.hash}`);

/* Replaces the address that contains the token, which is now a cookie, by that of the page. */

location.replace(`/${location.hash}`);
